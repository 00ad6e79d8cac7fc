// `prepare`: clears the workspace, and computes bounds of the k-th magnitude from the previous selection or from a sample.
#pragma once

#include "../../cpu/selection/sampling.hpp"
#include "../block_reduce.hpp"
#include "sources.hpp"

namespace topkube {

TOPKUBE_DEVICE u32 bit_width(u32 value) {
  u32 width = 0;
  while (value) {
    value >>= 1;
    ++width;
  }
  return width;
}

// Returns true if the bounds can come from the previous selection.
TOPKUBE_DEVICE bool has_previous(const Selection& selection) {
  return reuse && selection.samples && selection.previous && selection.previous->length == selection.length &&
         selection.previous->k == selection.k;
}

// Keeps the k-th magnitude for the next selection. The margin follows the number of candidates, so that it fits data of any
// distribution. After a fallback it keeps nothing: the next selection samples.
TOPKUBE_DEVICE void keep_threshold(const Selection& selection, u32 magnitude) {
  if (!reuse || !selection.previous) return;
  const State& state = *selection.state;
  PreviousThreshold kept{};
  if (selection.samples && state.mode == from_candidates) {
    const u32 margin = magnitude - state.least;
    kept.length = selection.length;
    kept.k = selection.k;
    kept.magnitude = magnitude;
    // Too many candidates: the margin shrinks as their number should. Too few: it grows by a quarter.
    kept.margin =
        state.candidates > selection.aim ? static_cast<u32>(margin * selection.aim / state.candidates) : margin + margin / 4 + 1;
  }
  *selection.previous = kept;
}

template <class Source>
TOPKUBE_KERNEL(prepare_threads) prepare(Source source, Selection selection) {
  auto& scratch = gpu::shared<BlockScratch>();
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < selection.clear_words;
       i += u64{gpu::blocks()} * gpu::threads()) {
    selection.clear[i] = 0;
  }
  if (gpu::block() != 0) return;
  u32 least = 0, most = Source::mask;
  const bool reused = has_previous(selection);
  if (reused) {
    const u32 magnitude = selection.previous->magnitude & Source::mask, margin = selection.previous->margin;
    const u64 above = u64{magnitude} + 2 * u64{margin};  // further away than `least`: larger magnitudes are fewer
    least = magnitude > margin ? magnitude - margin : 0;
    most = above < most ? static_cast<u32>(above) : most;
  } else if (selection.samples) {
    u32 sample[samples_per_thread];
#pragma unroll
    for (u32 j = 0; j < samples_per_thread; ++j) {
      const u64 i = gpu::thread() + u64{j} * gpu::threads();
      // A place without a sample counts as magnitude 0, which reaches no bound above 0.
      sample[j] = i < selection.samples ? source.peek(compute_sample_position(i, selection.stratum)) & Source::mask : 0;
    }
    // Finds, bit by bit, the magnitudes that `low_rank` and `high_rank` samples reach.
    u32 low = 0, high = 0, above_low = most_samples, above_high = selection.high_rank ? most_samples : 0;
    for (u32 bit = Source::width; bit-- > 0 && (above_low > selection.low_rank || above_high > selection.high_rank);) {
      const u32 try_low = low | u32{1} << bit, try_high = high | u32{1} << bit;
      u32 reached = 0;
#pragma unroll
      for (u32 j = 0; j < samples_per_thread; ++j) {
        reached += (sample[j] >= try_low ? 1u : 0u) + (sample[j] >= try_high ? 0x10000u : 0u);
      }
      reached = block_total(reached, scratch);
      const u32 reach_low = reached & 0xffffu, reach_high = reached >> 16;
      if (reach_low >= selection.low_rank) low = try_low, above_low = reach_low;
      if (reach_high >= selection.high_rank) high = try_high, above_high = reach_high;
    }
    least = low;
    if (selection.high_rank) most = high;
  }
  if (gpu::thread() == 0) {
    State state{};
    state.mode = selection.mode;
    state.least = least;
    state.most = most;
    state.rank = selection.k;
    state.bits = Source::width;
    state.reused = reused ? 1u : 0u;
    *selection.state = state;
  }
}

}  // namespace topkube
