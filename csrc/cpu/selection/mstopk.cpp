// MSTopK: "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", Algorithm 1.
//
// The algorithm bisects between the mean and the largest magnitude, and counts at each of N probes how many magnitudes reach the
// probe. That count exceeds k if and only if the (k + 1)-th largest magnitude reaches the probe. So this code finds that
// magnitude once and counts nothing per probe. Each probe is exactly the fp32 number of the algorithm.
#include <limits>

#include "cpu/elements.hpp"
#include "cpu/selection/filter.hpp"
#include "cpu/selection/radix_select.hpp"
#include "cpu/selection/select.hpp"
#include "cpu/selection/select_candidates.hpp"

namespace topkube {
namespace {

thread_local Workspace workspace;
thread_local Workspace scratch_space;

// Adds the sums of the blocks in a fixed order that a GPU can follow in parallel (csrc/cuda/mstopk.hpp): chain i adds the sums i,
// i + 1,024, i + 2,048, ...; then a tree adds the chains.
double add_block_sums(const std::vector<double>& sums) {
  constexpr std::size_t chains = 1024;
  double chain[chains] = {};
  for (std::size_t i = 0; i < sums.size(); ++i) chain[i % chains] += sums[i];
  for (std::size_t half = chains / 2; half; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) chain[i] += chain[i + half];
  }
  return chain[0];
}

// Filters by fp32 magnitude, and summarises the magnitudes of each block while the block is in the cache.
struct SummarisingFilter {
  static constexpr bool continues_when_full = true;
  const PathKernels& path;
  const void* data;
  Dtype dtype;
  double* sums;
  std::uint32_t* largest;
  std::size_t operator()(std::size_t start, std::size_t size, std::uint32_t threshold, std::uint32_t* indices,
                         std::uint32_t* values) const {
    path.summarise_magnitudes[code_of(dtype)](element_address(data, dtype, start), size, sums + start / block,
                                              largest + start / block);
    return path.filter_float[code_of(dtype)](element_address(data, dtype, start), size, static_cast<std::uint32_t>(start),
                                             threshold, indices, values);
  }
};

enum class Answer { few, many, unknown };  // at most k magnitudes reach the probe; more than k; not known yet

// The bisection of the algorithm between the mean (ratio 0) and the largest magnitude (ratio 1).
struct Bisection {
  double mean, largest;
  int probes_left;
  double left = 0, right = 1;
  float upper = std::numeric_limits<float>::infinity(), lower = 0;

  // Probes until all probes are done or `decide` returns `unknown`.
  template <class Decide>
  void probe(const Decide& decide) {
    for (; probes_left > 0; --probes_left) {
      const double ratio = left + (right - left) / 2;
      const auto threshold = static_cast<float>(mean + ratio * (largest - mean));
      const Answer answer = decide(bits_of(threshold));
      if (answer == Answer::unknown) return;
      // A later probe with the same answer is closer, so the last probe is the best. If two probes have the same count, both
      // select the same entries.
      if (answer == Answer::few) {
        right = ratio;
        upper = threshold;
      } else {
        left = ratio;
        lower = threshold;
      }
    }
  }
};

// Writes the selected entries in order: all entries that reach `upper`, and of the entries between the thresholds those with the
// numbers first to last - 1.
struct ThresholdOutput {
  Dtype dtype;
  std::uint32_t upper, lower;
  std::size_t first, last, k;
  std::uint32_t* indices;
  void* values;
  std::size_t between = 0, count = 0;  // the entries so far that lie between the thresholds, and that are written

  ThresholdOutput(Dtype dtype, const Thresholds& thresholds, std::size_t k, std::uint64_t seed, std::uint32_t* indices,
                  void* values)
      : dtype(dtype), upper(bits_of(thresholds.upper)), lower(bits_of(thresholds.lower)), k(k), indices(indices), values(values) {
    const std::size_t consecutive = k - thresholds.above_upper;
    // The consecutive entries must end inside the list of entries between the thresholds.
    const std::size_t offsets = thresholds.above_lower - thresholds.above_upper - consecutive + 1;
    first = static_cast<std::size_t>(static_cast<unsigned __int128>(mix_bits(seed)) * offsets >> 64);
    last = first + consecutive;
  }

  void take(const Run& run) {
    for (std::size_t i = 0; i < run.count && count < k; ++i) {
      const std::uint32_t magnitude = run.values[i] & magnitude_bits;
      const bool is_above = magnitude >= upper, is_between = !is_above && magnitude >= lower;
      if (is_above || (is_between && between >= first && between < last)) put(run.indices[i], run.values[i]);
      between += is_between;
    }
  }

 private:
  void put(std::uint32_t index, std::uint32_t bits) {
    indices[count] = index;
    if (dtype == Dtype::f32) {
      static_cast<std::uint32_t*>(values)[count] = bits;
    } else {
      const float value = float_of(bits);
      static_cast<std::uint16_t*>(values)[count] = dtype == Dtype::bf16 ? to_bf16(value) : to_f16(value);  // exact
    }
    ++count;
  }
};

std::size_t count_at_least(const Candidates& candidates, float threshold) {
  const std::uint32_t least = bits_of(threshold);
  std::size_t count = 0;
  for (const Run& run : candidates.runs) {
    for (std::size_t i = 0; i < run.count; ++i) count += (run.values[i] & magnitude_bits) >= least;
  }
  return count;
}

// Returns the histogram of part(magnitude as fp32) over all elements. Ignores values of `size` and above.
template <class Part>
std::vector<std::uint32_t> build_float_histogram(const void* data, Dtype dtype, std::size_t length, std::size_t size, int threads,
                                                 const Part& part) {
  const auto magnitude = [&part](std::uint32_t bits) { return part(bits & magnitude_bits); };
  if (dtype == Dtype::f32) return build_histogram<std::uint32_t>(data, length, size, threads, magnitude);
  if (dtype == Dtype::bf16) {
    return build_histogram<std::uint16_t>(data, length, size, threads,
                                          [&](std::uint16_t bits) { return magnitude(bits_of(from_bf16(bits))); });
  }
  return build_histogram<std::uint16_t>(data, length, size, threads,
                                        [&](std::uint16_t bits) { return magnitude(bits_of(from_f16(bits))); });
}

// Finds the thresholds without candidates. A histogram of the upper 16 bits answers every probe outside the bin of the (k + 1)-th
// largest magnitude. A second histogram of the lower 15 bits covers that bin and the bins of both thresholds: it answers the other
// probes and yields both counts.
Thresholds find_thresholds_by_histogram(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads,
                                        Bisection bisection) {
  constexpr unsigned low_bits = 15;
  constexpr std::uint32_t low_size = 1u << low_bits;
  const auto coarse = build_float_histogram(data, dtype, length, 1u << 16, threads, [](std::uint32_t m) { return m >> low_bits; });
  const bool all = k == length;
  std::size_t rank = k + 1;
  const std::uint32_t bin = all ? 0 : static_cast<std::uint32_t>(find_bin_of_kth(coarse.data(), coarse.size(), rank));
  bisection.probe([&](std::uint32_t probe) {
    if (all || probe >> low_bits > bin) return Answer::few;
    return probe >> low_bits < bin ? Answer::many : Answer::unknown;
  });
  const std::uint32_t refined[3] = {bin, bits_of(bisection.upper) >> low_bits, bits_of(bisection.lower) >> low_bits};
  const auto fine = build_float_histogram(data, dtype, length, 3 * low_size, threads, [&refined](std::uint32_t m) {
    const std::uint32_t high = m >> low_bits, low = m & (low_size - 1);
    const std::uint32_t table = high == refined[0] ? 0 : high == refined[1] ? 1 : high == refined[2] ? 2 : 3;  // 3: ignored
    return table * low_size + low;
  });
  if (!all) {
    const std::uint32_t kth = bin << low_bits | static_cast<std::uint32_t>(find_bin_of_kth(fine.data(), low_size, rank));
    bisection.probe([kth](std::uint32_t probe) { return probe > kth ? Answer::few : Answer::many; });
  }
  const auto count = [&](float threshold) {
    const std::uint32_t high = bits_of(threshold) >> low_bits, low = bits_of(threshold) & (low_size - 1);
    std::size_t reached = 0;
    for (std::size_t i = high + 1; i < coarse.size(); ++i) reached += coarse[i];
    const std::size_t table = high == refined[0] ? 0 : high == refined[1] ? 1 : 2;
    for (std::size_t i = low; i < low_size; ++i) reached += fine[table * low_size + i];
    return reached;
  };
  return {bisection.upper, bisection.lower, count(bisection.upper), count(bisection.lower)};
}

// Finds the thresholds if the candidates are sufficient: the (k + 1)-th largest magnitude, which answers all probes, is among
// them, and every entry that reaches the lower threshold is a candidate. Returns false otherwise.
bool find_thresholds_in_candidates(const Candidates& candidates, const FilterPlan& plan, std::size_t length, std::size_t k,
                                   Bisection bisection, Thresholds* thresholds) {
  const std::size_t needed = std::min(k + 1, length);
  if (candidates.overflowed || candidates.count < needed) return false;
  if (k == length) {
    bisection.probe([](std::uint32_t) { return Answer::few; });
  } else {
    const std::uint32_t kth =
        find_kth_largest(candidates.runs, needed, magnitude_bits, plan.threshold, scratch_space.reserve(candidates.count + 1))
            .threshold;
    bisection.probe([kth](std::uint32_t probe) { return probe > kth ? Answer::few : Answer::many; });
  }
  if (bits_of(bisection.lower) < plan.threshold) return false;
  *thresholds = {bisection.upper, bisection.lower, count_at_least(candidates, bisection.upper),
                 count_at_least(candidates, bisection.lower)};
  return true;
}

// Filters the data again, block by block, by the lower threshold.
void write_from_data(const void* data, Dtype dtype, std::size_t length, ThresholdOutput& output) {
  std::vector<std::uint32_t> room(2 * (block + filter_slack));
  Run run{room.data(), room.data() + block + filter_slack, 0};
  for (std::size_t start = 0; start < length && output.count < output.k; start += block) {
    run.count =
        active_path().filter_float[code_of(dtype)](element_address(data, dtype, start), std::min(block, length - start),
                                                   static_cast<std::uint32_t>(start), output.lower, run.indices, run.values);
    output.take(run);
  }
}

}  // namespace

Effort mstopk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int iterations, std::uint64_t seed, int threads,
              std::uint32_t* indices, void* values, Thresholds* thresholds) {
  const IeeeScope ieee;
  const std::size_t needed = std::min(k + 1, length);  // all answers depend on the magnitude of this rank
  const FilterPlan plan =
      plan_filter(length, needed, magnitude_bits, workspace, [&](std::size_t i) { return load_element_bits(data, dtype, i); });
  const std::size_t blocks = (length + block - 1) / block;
  std::vector<double> sums(blocks);
  std::vector<std::uint32_t> tops(blocks);
  const Candidates candidates =
      filter_chunks(length, plan, threads, workspace, SummarisingFilter{active_path(), data, dtype, sums.data(), tops.data()});
  Effort effort{1, candidates.count};
  const std::uint32_t largest = *std::max_element(tops.begin(), tops.end());
  if (largest >= infinity_bits) {  // the mean has no meaning: selects the exact top k
    *thresholds = {};
    if (dtype == Dtype::f32) {
      return select_f32_from_candidates(candidates, plan, static_cast<const float*>(data), length, k, threads, indices,
                                        static_cast<float*>(values));
    }
    effort = topk(data, dtype, length, k, threads, indices, values);
    ++effort.passes;
    return effort;
  }
  Bisection bisection{add_block_sums(sums) / static_cast<double>(length), float_of(largest), iterations};

  if (find_thresholds_in_candidates(candidates, plan, length, k, bisection, thresholds)) {
    ThresholdOutput output(dtype, *thresholds, k, seed, indices, values);
    for (const Run& run : candidates.runs) output.take(run);
  } else {
    *thresholds = find_thresholds_by_histogram(data, dtype, length, k, threads, bisection);
    effort.passes += 3;
    ThresholdOutput output(dtype, *thresholds, k, seed, indices, values);
    write_from_data(data, dtype, length, output);
  }
  workspace.trim();
  scratch_space.trim();
  return effort;
}

}  // namespace topkube
