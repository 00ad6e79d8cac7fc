#include "cpu/selection/select.hpp"

#include "cpu/elements.hpp"
#include "cpu/selection/filter.hpp"
#include "cpu/selection/radix_select.hpp"
#include "cpu/selection/select_candidates.hpp"

namespace topkube {
namespace {

thread_local Workspace workspace;
thread_local Workspace scratch;

std::uint32_t mask_of(Dtype dtype) { return dtype == Dtype::f32 ? magnitude_bits : magnitude_bits_16; }

// Writes the selected entries in the order of their indices: all entries above the threshold, and the first `ties` that equal it.
template <class Item>
struct ExactOutput {
  std::uint32_t* indices;
  Item* values;
  std::uint32_t mask;
  ExactThreshold exact;
  std::size_t k;
  std::size_t count = 0;

  // Decides if the next entry is selected. A selected tie reduces `exact.ties`. Ties are rare, so the branch is almost always
  // predicted.
  bool decide(std::uint32_t value) {
    const std::uint32_t magnitude = value & mask;
    if (magnitude != exact.threshold) [[likely]]
      return magnitude > exact.threshold;
    if (exact.ties == 0) return false;
    --exact.ties;
    return true;
  }

  void take(const Run& run) {
    for (std::size_t i = 0; i < run.count && count < k; ++i) {
      indices[count] = run.indices[i];  // the next entry overwrites this one unless it is selected
      values[count] = static_cast<Item>(run.values[i]);
      count += decide(run.values[i]);
    }
  }

  // Does the same, and writes the entries that are not selected to `left_...`, which have room for one entry more than needed.
  std::size_t split(const Run& run, std::uint32_t* left_indices, std::uint32_t* left_values) {
    std::size_t left = 0;
    for (std::size_t i = 0; i < run.count; ++i) {
      const bool is_selected = decide(run.values[i]);
      if (count < k) {
        indices[count] = run.indices[i];
        values[count] = run.values[i];
      }
      left_indices[left] = run.indices[i];
      left_values[left] = run.values[i];
      count += is_selected;
      left += !is_selected;
    }
    return left;
  }
};

// Filters block by block with the exact threshold. No buffer is larger than a block.
template <class Item>
void collect(const void* data, Dtype dtype, std::size_t length, std::size_t k, const ExactThreshold& exact, std::uint32_t* indices,
             Item* values) {
  const PathKernels& path = active_path();
  std::vector<std::uint32_t> room(2 * (block + filter_slack));
  Run run{room.data(), room.data() + block + filter_slack, 0};
  ExactOutput<Item> output{indices, values, mask_of(dtype), exact, k};
  for (std::size_t start = 0; start < length && output.count < k; start += block) {
    run.count = path.filter_bits[code_of(dtype)](element_address(data, dtype, start), std::min(block, length - start),
                                                 static_cast<std::uint32_t>(start), exact.threshold, run.indices, run.values);
    output.take(run);
  }
}

struct BitsFilter {
  static constexpr bool continues_when_full = false;
  const PathKernels& path;
  const void* data;
  Dtype dtype;
  std::size_t operator()(std::size_t start, std::size_t size, std::uint32_t threshold, std::uint32_t* indices,
                         std::uint32_t* values) const {
    return path.filter_bits[code_of(dtype)](element_address(data, dtype, start), size, static_cast<std::uint32_t>(start), threshold,
                                            indices, values);
  }
};

struct AccumulatingFilter {
  static constexpr bool continues_when_full = true;  // acc is written to its end, even if the candidate buffer is full
  const PathKernels& path;
  const void* gradient;
  Dtype dtype;
  const float* residual;
  float* acc;
  std::size_t operator()(std::size_t start, std::size_t size, std::uint32_t threshold, std::uint32_t* indices,
                         std::uint32_t* values) const {
    return path.accumulate_filter[code_of(dtype)](element_address(gradient, dtype, start), residual + start, acc + start, size,
                                                  static_cast<std::uint32_t>(start), threshold, indices, values);
  }
};

// Selects exactly from the data itself, without candidates.
template <class Item>
void select_from_data(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices,
                      Item* values, Effort& effort) {
  const ExactThreshold exact = find_threshold_by_histogram(data, dtype, length, k, threads, effort.passes);
  collect(data, dtype, length, k, exact, indices, values);
  effort.passes += 1;
}

// Selects from the candidates, or from the data again if there are too few or too many candidates.
template <class Item>
Effort select_from_candidates(const Candidates& candidates, const FilterPlan& plan, int passes, const void* data, Dtype dtype,
                              std::size_t length, std::size_t k, int threads, std::uint32_t* indices, Item* values) {
  Effort effort{passes, candidates.count};
  if (!candidates.overflowed && candidates.count >= k) {
    const std::uint32_t mask = mask_of(dtype);
    ExactOutput<Item> output{indices, values, mask,
                             find_kth_largest(candidates.runs, k, mask, plan.threshold, scratch.reserve(candidates.count + 1)), k};
    for (const Run& run : candidates.runs) output.take(run);
  } else {
    select_from_data(data, dtype, length, k, threads, indices, values, effort);
  }
  workspace.trim();
  scratch.trim();
  return effort;
}

// Writes acc[indices[i]] = value(i), in order.
template <class Value>
void put_back(float* acc, const std::uint32_t* indices, std::size_t count, const Value& value) {
  constexpr std::size_t ahead = 32;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + ahead < count) __builtin_prefetch(acc + indices[i + ahead], 1);
    acc[indices[i]] = value(i);
  }
}

template <class Item>
Effort select_topk(const Item* x, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices,
                   Item* values) {
  const FilterPlan plan = plan_filter(length, k, mask_of(dtype), workspace, [x](std::size_t i) { return std::uint32_t{x[i]}; });
  Candidates candidates;
  int passes = 0;
  if (plan.threshold != unreachable_threshold) {
    candidates = filter_chunks(length, plan, threads, workspace, BitsFilter{active_path(), x, dtype});
    passes = 1;
  }
  return select_from_candidates(candidates, plan, passes, x, dtype, length, k, threads, indices, values);
}

}  // namespace

Effort select_f32_from_candidates(const Candidates& candidates, const FilterPlan& plan, const float* data, std::size_t length,
                                  std::size_t k, int threads, std::uint32_t* indices, float* values) {
  return select_from_candidates(candidates, plan, 1, data, Dtype::f32, length, k, threads, indices,
                                reinterpret_cast<std::uint32_t*>(values));
}

Effort topk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices, void* values) {
  if (dtype == Dtype::f32) {
    return select_topk(static_cast<const std::uint32_t*>(data), dtype, length, k, threads, indices,
                       static_cast<std::uint32_t*>(values));
  }
  return select_topk(static_cast<const std::uint16_t*>(data), dtype, length, k, threads, indices,
                     static_cast<std::uint16_t*>(values));
}

Effort compress(const void* gradient, Dtype dtype, const float* residual, float* acc, std::size_t length, std::size_t k,
                int threads, std::uint32_t* indices, float* values) {
  const IeeeScope ieee;
  const FilterPlan plan = plan_filter(length, k, magnitude_bits, workspace, [&](std::size_t i) {
    return bits_of(canonical(residual[i] + float_of(load_element_bits(gradient, dtype, i))));
  });
  const Candidates candidates =
      filter_chunks(length, plan, threads, workspace, AccumulatingFilter{active_path(), gradient, dtype, residual, acc});
  // The filter has set all candidates to zero in acc. Candidates that are not selected get their values back; they are few.
  Effort effort{1, candidates.count};
  auto* bits = reinterpret_cast<std::uint32_t*>(values);
  if (!candidates.overflowed && candidates.count >= k) {
    std::uint32_t* room = scratch.reserve(2 * candidates.count + 2);
    const ExactThreshold exact = find_kth_largest(candidates.runs, k, magnitude_bits, plan.threshold, room);
    ExactOutput<std::uint32_t> output{indices, bits, magnitude_bits, exact, k};
    std::uint32_t *left_indices = room, *left_values = room + candidates.count + 1;
    std::size_t left = 0;
    for (const Run& run : candidates.runs) left += output.split(run, left_indices + left, left_values + left);
    put_back(acc, left_indices, left, [left_values](std::size_t i) { return float_of(left_values[i]); });
  } else {
    for (const Run& run : candidates.runs) {
      put_back(acc, run.indices, run.count, [&run](std::size_t i) { return float_of(run.values[i]); });
    }
    select_from_data(acc, Dtype::f32, length, k, threads, indices, bits, effort);
    put_back(acc, indices, k, [](std::size_t) { return 0.0f; });
  }
  workspace.trim();
  scratch.trim();
  return effort;
}

}  // namespace topkube
