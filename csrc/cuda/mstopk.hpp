// MSTopK on the GPU: the same thresholds, counts and entries as csrc/cpu/selection/mstopk.cpp, bit for bit.
//
// As on the CPU, one number answers all probes of the algorithm: the (k + 1)-th largest magnitude. The kernels of select.hpp find
// it: `Selection::k` is k + 1 here, and the argument `entries` is k. Then `bisect` probes, `count` counts the magnitudes that reach
// the two thresholds, and `collect` writes the entries. Magnitudes are compared in the format of the data, so an fp32 threshold
// becomes the smallest 16-bit magnitude that reaches it.
#pragma once

#include "select.hpp"

namespace topkube {

constexpr u32 summary_block = 4096, summary_threads = 256, combine_threads = 1024, count_threads = 256;

// For each block of 4,096 elements: the sum of |x| in double, in sixteen running sums (csrc/cpu/paths/selection_loops.hpp), and the
// bits of the largest |x| as fp32. Half a warp works on one block; each lane has one running sum.
template <class T>
TOPKUBE_KERNEL(summary_threads) summarise_magnitudes(Bits<T> source, u64 length, double* sums, u32* largest) {
  const u64 blocks = (length + summary_block - 1) / summary_block, warps = u64{gpu::blocks()} * (gpu::threads() / 32);
  const u32 lane = gpu::lane(), column = lane & 15u;
  for (u64 pair = u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp(); 2 * pair < blocks; pair += warps) {
    const u64 block = 2 * pair + lane / 16, base = block * summary_block + column;
    double sum = 0;
    u32 top = 0;
    constexpr u32 ahead = 8;
    for (u32 row = 0; row < summary_block / 16; row += ahead) {
      typename T::Item items[ahead];
#pragma unroll
      for (u32 j = 0; j < ahead; ++j) {
        const u64 i = base + 16 * u64{row + j};
        items[j] = i < length ? reinterpret_cast<const typename T::Item*>(source.x)[i] : typename T::Item{};
      }
#pragma unroll
      for (u32 j = 0; j < ahead; ++j) {
        const u32 magnitude = bits_of(T::load(items[j])) & magnitude_bits;
        top = magnitude > top ? magnitude : top;
        sum += static_cast<double>(float_of(magnitude));
      }
    }
    for (u32 mask = 8; mask; mask /= 2) {
      sum += gpu::shuffle_xor(sum, mask);
      const u32 other = gpu::shuffle_xor(top, mask);
      top = other > top ? other : top;
    }
    if (column == 0 && block < blocks) {
      sums[block] = sum;
      largest[block] = top;
    }
  }
}

struct CombineShared {
  double sums[combine_threads];
  u32 largest[32];
};

// Runs as one block. Adds the sums of the blocks in a fixed order, as csrc/cpu/selection/mstopk.cpp does: thread i adds the sums i,
// i + 1,024, i + 2,048, ...; then a tree adds the sums of the threads. Also finds the largest magnitude, and sets the rank to
// search for.
TOPKUBE_KERNEL(combine_threads) combine_summaries(Selection selection, u64 entries, const double* sums, const u32* largest,
                                                  u64 blocks) {
  auto& shared = gpu::shared<CombineShared>();
  double sum = 0;
  u32 top = 0;
#pragma unroll 8
  for (u64 i = gpu::thread(); i < blocks; i += combine_threads) {
    sum += sums[i];
    top = largest[i] > top ? largest[i] : top;
  }
  shared.sums[gpu::thread()] = sum;
  for (u32 half = combine_threads / 2; half; half /= 2) {
    gpu::sync();
    if (gpu::thread() < half) shared.sums[gpu::thread()] += shared.sums[gpu::thread() + half];
  }
  for (u32 mask = 16; mask; mask /= 2) {
    const u32 other = gpu::shuffle_xor(top, mask);
    top = other > top ? other : top;
  }
  if (gpu::lane() == 0) shared.largest[gpu::warp()] = top;
  gpu::sync();
  if (gpu::thread() != 0) return;
  for (u32 i = 0; i < gpu::threads() / 32; ++i) top = shared.largest[i] > top ? shared.largest[i] : top;
  State& state = *selection.state;
  state.mean = shared.sums[0] / static_cast<double>(selection.length);
  state.largest = top;
  state.nonfinite = top >= infinity_bits;
  state.rank = state.nonfinite ? entries : selection.k;  // the rank of the exact top-k, or the rank that answers all probes
}

// Converts a magnitude in the format of the data to the bits of an fp32.
template <class T>
TOPKUBE_DEVICE u32 value_of(u32 magnitude) {
  if constexpr (sizeof(typename T::Item) == 4) {
    return magnitude;
  } else {
    return bits_of(T::load(static_cast<typename T::Item>(magnitude)));
  }
}

// Returns the smallest magnitude in the format of the data whose fp32 value is at least `threshold`. Infinity always qualifies.
template <class T>
TOPKUBE_DEVICE u32 native_bound(float threshold) {
  if constexpr (sizeof(typename T::Item) == 4) return bits_of(threshold);
  u32 low = 0, high = 0x7fffu;  // a NaN, which is above every threshold
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (value_of<T>(middle) >= bits_of(threshold)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Computes both thresholds with one thread, from the magnitude that answers all probes.
template <class T>
TOPKUBE_KERNEL(32) bisect(Selection selection, u64 entries, int iterations) {
  State& state = *selection.state;
  if (gpu::thread() != 0) return;
  if (state.nonfinite) {  // select the exact top-k instead
    state.thresholds[0] = state.thresholds[1] = 0;
    return;
  }
  const u32 kth = value_of<T>(state.base);
  const bool all = entries == selection.length;  // no magnitude has rank k + 1: at most k magnitudes reach any probe
  const double mean = state.mean, most = float_of(state.largest);
  double left = 0, right = 1;
  u32 upper = infinity_bits, lower = 0;
  for (; iterations > 0; --iterations) {
    const double ratio = left + (right - left) / 2;
    const float threshold = static_cast<float>(mean + ratio * (most - mean));
    if (all || bits_of(threshold) > kth) {
      right = ratio;
      upper = bits_of(threshold);
    } else {
      left = ratio;
      lower = bits_of(threshold);
    }
  }
  state.thresholds[0] = float_of(upper);
  state.thresholds[1] = float_of(lower);
  state.upper = native_bound<T>(float_of(upper));
  state.lower = native_bound<T>(float_of(lower));
  if (state.lower < state.least) state.mode = from_data;
}

struct CountShared {
  BlockScratch scratch;
};

// Counts the magnitudes that reach each threshold. The counts determine where the entries between the thresholds begin.
template <class Source>
TOPKUBE_KERNEL(count_threads) count(Source source, Selection selection, u64 entries, u64 seed) {
  auto& shared = gpu::shared<CountShared>();
  State& state = *selection.state;
  if (state.nonfinite) return;
  const bool reads_data = state.mode == from_data;
  const u64 length = reads_data ? selection.length : state.candidates;
  const u32 upper = state.upper, lower = state.lower;
  u64 reached[2] = {0, 0};
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < length; i += u64{gpu::blocks()} * gpu::threads()) {
    const u32 magnitude = (reads_data ? source.peek(i) : selection.values[i]) & Source::mask;
    reached[0] += magnitude >= upper;
    reached[1] += magnitude >= lower;
  }
  for (u32 kind = 0; kind < 2; ++kind) {
    const u64 sum = block_sum(reached[kind], shared.scratch);
    if (gpu::thread() == 0 && sum) gpu::add(state.above + kind, sum);
  }
  if (!is_last_block(&state.count_done, shared.scratch) || gpu::thread() != 0) return;
  const u64 above = gpu::observe(state.above), between_count = entries - above;
  // The consecutive entries must end inside the list of entries between the thresholds.
  const u64 offsets = gpu::observe(state.above + 1) - above - between_count + 1;
  state.between_count = between_count;
  state.first_between = gpu::high_product(mix_bits(seed), offsets);
}

}  // namespace topkube
