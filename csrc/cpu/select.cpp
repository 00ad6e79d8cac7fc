#include "select.hpp"

#include "candidates.hpp"

namespace topkube {
namespace {

thread_local Workspace workspace;
thread_local Workspace scratch_space;

int slot(Dtype dtype) { return static_cast<int>(dtype); }
std::uint32_t mask_of(Dtype dtype) { return dtype == Dtype::f32 ? magnitude_of_f32 : magnitude_of_16; }

const char* at(const void* data, Dtype dtype, std::size_t index) {
  return static_cast<const char*>(data) + index * item_size(dtype);
}

// Where the selected go, in order of their indices: all above the threshold, and the first `ties` of those equal to it.
template <class Item>
struct Output {
  std::uint32_t* indices;
  Item* values;
  std::uint32_t mask, threshold;
  std::size_t ties;
  std::size_t k;
  std::size_t count = 0;

  void take(const Run& run) {
    for (std::size_t i = 0; i < run.count && count < k; ++i) {
      const std::uint32_t magnitude = run.values[i] & mask;
      const bool tie = magnitude == threshold;
      indices[count] = run.indices[i];  // overwritten by the next one unless it counts
      values[count] = static_cast<Item>(run.values[i]);
      count += magnitude > threshold || (tie && ties > 0);
      ties -= tie && ties > 0;
    }
  }
};

// The number of values above a threshold, which are all taken; the rest of k are ties.
std::size_t above(const Candidates& found, std::uint32_t mask, std::uint32_t threshold) {
  std::size_t count = 0;
  for (const Run& run : found.runs) {
    for (std::size_t i = 0; i < run.count; ++i) count += (run.values[i] & mask) > threshold;
  }
  return count;
}

template <class Item>
void finish(const Candidates& found, std::size_t k, std::uint32_t mask, std::uint32_t least, std::uint32_t* indices,
            Item* values) {
  const std::uint32_t threshold = kth_largest(found.runs, k, mask, least, scratch_space.room(found.count + 1));
  Output<Item> output{indices, values, mask, threshold, k - above(found, mask, threshold), k};
  for (const Run& run : found.runs) output.take(run);
}

// The k-th largest magnitude by two histograms (one where 16 bits are all there is), and how many equal ones are needed.
struct Exact {
  std::uint32_t threshold;
  std::size_t ties;
  int passes;
};

Exact by_histogram(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads) {
  std::size_t rank = k;
  if (dtype != Dtype::f32) {
    const auto bins = histogram<std::uint16_t>(data, length, 1u << 15, threads,
                                               [](std::uint32_t bits) { return bits & magnitude_of_16; });
    const auto bin = static_cast<std::uint32_t>(bin_of_kth(bins.data(), bins.size(), rank));
    return {bin, rank, 1};
  }
  const auto bins = histogram<std::uint32_t>(data, length, 1u << 16, threads,
                                             [](std::uint32_t bits) { return (bits & magnitude_of_f32) >> 15; });
  const auto high = static_cast<std::uint32_t>(bin_of_kth(bins.data(), bins.size(), rank)) << 15;
  // What lies outside the bin wraps or exceeds 2^15, and is left out.
  const auto fine = histogram<std::uint32_t>(data, length, 1u << 15, threads,
                                             [high](std::uint32_t bits) { return (bits & magnitude_of_f32) - high; });
  const auto low = static_cast<std::uint32_t>(bin_of_kth(fine.data(), fine.size(), rank));
  return {high | low, rank, 2};
}

// Filters block by block with the exact threshold; no buffer larger than a block.
template <class Item>
void collect(const void* data, Dtype dtype, std::size_t length, std::size_t k, const Exact& exact, std::uint32_t* indices,
             Item* values) {
  const PathKernels& path = active();
  std::vector<std::uint32_t> room(2 * (block + filter_slack));
  Run run{room.data(), room.data() + block + filter_slack, 0};
  Output<Item> output{indices, values, mask_of(dtype), exact.threshold, exact.ties, k};
  for (std::size_t start = 0; start < length && output.count < k; start += block) {
    run.count = path.filter_bits[slot(dtype)](at(data, dtype, start), std::min(block, length - start),
                                              static_cast<std::uint32_t>(start), exact.threshold, run.indices, run.values);
    output.take(run);
  }
}

struct BitsFilter {
  static constexpr bool goes_on = false;
  const PathKernels& path;
  const void* data;
  Dtype dtype;
  std::size_t operator()(std::size_t start, std::size_t size, std::uint32_t threshold, std::uint32_t* indices,
                         std::uint32_t* values) const {
    return path.filter_bits[slot(dtype)](at(data, dtype, start), size, static_cast<std::uint32_t>(start), threshold, indices,
                                         values);
  }
};

struct AccumulatingFilter {
  static constexpr bool goes_on = true;  // acc is written to its end, full or not
  const PathKernels& path;
  const void* gradient;
  Dtype dtype;
  const float* residual;
  float* acc;
  std::size_t operator()(std::size_t start, std::size_t size, std::uint32_t threshold, std::uint32_t* indices,
                         std::uint32_t* values) const {
    return path.accumulate_filter[slot(dtype)](at(gradient, dtype, start), residual + start, acc + start, size,
                                               static_cast<std::uint32_t>(start), threshold, indices, values);
  }
};

// From what the filter left, or from the data again where that is too little or too much.
template <class Item>
Effort select_from(const Candidates& found, const Plan& plan, int passes, const void* data, Dtype dtype, std::size_t length,
                   std::size_t k, int threads, std::uint32_t* indices, Item* values) {
  Effort effort{passes, found.count};
  if (!found.overflowed && found.count >= k) {
    finish(found, k, mask_of(dtype), plan.threshold, indices, values);
  } else {
    const Exact exact = by_histogram(data, dtype, length, k, threads);
    collect(data, dtype, length, k, exact, indices, values);
    effort.passes += exact.passes + 1;
  }
  workspace.trim();
  scratch_space.trim();
  return effort;
}

template <class Item>
Effort topk_of(const Item* x, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices, Item* values) {
  const Plan plan = plan_filter(length, k, mask_of(dtype), workspace, [x](std::size_t i) { return std::uint32_t{x[i]}; });
  Candidates found;
  int passes = 0;
  if (plan.threshold != nothing) {
    found = filter_pass(length, plan, threads, workspace, BitsFilter{active(), x, dtype});
    passes = 1;
  }
  return select_from(found, plan, passes, x, dtype, length, k, threads, indices, values);
}

float element(const void* data, Dtype dtype, std::size_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return dtype == Dtype::bf16 ? from_bf16(bits) : from_f16(bits);
}

}  // namespace

Effort select_f32_from(const Candidates& found, const Plan& plan, const float* data, std::size_t length, std::size_t k, int threads,
                       std::uint32_t* indices, float* values) {
  return select_from(found, plan, 1, data, Dtype::f32, length, k, threads, indices, reinterpret_cast<std::uint32_t*>(values));
}

Effort topk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices, void* values) {
  if (dtype == Dtype::f32) {
    return topk_of(static_cast<const std::uint32_t*>(data), dtype, length, k, threads, indices,
                   static_cast<std::uint32_t*>(values));
  }
  return topk_of(static_cast<const std::uint16_t*>(data), dtype, length, k, threads, indices, static_cast<std::uint16_t*>(values));
}

Effort compress(const void* gradient, Dtype dtype, const float* residual, float* acc, std::size_t length, std::size_t k,
                int threads, std::uint32_t* indices, float* values) {
  const IeeeScope ieee;
  const Plan plan = plan_filter(length, k, magnitude_of_f32, workspace,
                                [&](std::size_t i) { return bits_of(residual[i] + element(gradient, dtype, i)); });
  const Candidates found =
      filter_pass(length, plan, threads, workspace, AccumulatingFilter{active(), gradient, dtype, residual, acc});
  const Effort effort = select_f32_from(found, plan, acc, length, k, threads, indices, values);
  constexpr std::size_t ahead = 32;
  for (std::size_t i = 0; i < k; ++i) {
    if (i + ahead < k) __builtin_prefetch(acc + indices[i + ahead], 1);
    acc[indices[i]] = 0.0f;
  }
  return effort;
}

}  // namespace topkube
