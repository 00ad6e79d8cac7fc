// `narrow`: finds the k-th magnitude among the candidates, or in the data.
#pragma once

#include "filter.hpp"

namespace topkube {

// Calls use(load(i), true) for the elements i of this thread. A thread starts several loads before it uses the first value. All
// lanes of a warp make the same calls; `inside` is false for elements beyond `length`.
template <class Load, class Use>
TOPKUBE_DEVICE void for_each_ahead(u64 length, const Load& load, const Use& use) {
  const u64 stride = u64{gpu::blocks()} * gpu::threads(), lane = gpu::lane();
  for (u64 first = u64{gpu::block()} * gpu::threads() + gpu::thread(); first - lane < length; first += narrow_ahead * stride) {
    u32 value[narrow_ahead];
#pragma unroll
    for (u32 j = 0; j < narrow_ahead; ++j) value[j] = first + j * stride < length ? load(first + j * stride) : 0;
#pragma unroll
    for (u32 j = 0; j < narrow_ahead; ++j) {
      if (first - lane + j * stride < length) use(value[j], first + j * stride < length);
    }
  }
}

struct NarrowShared {
  BlockScratch scratch;
  u32 bins[upper_bins];
};

// The k-th magnitude is known: selects all magnitudes above it, and `rank` of those that equal it.
TOPKUBE_DEVICE void settle(const Selection& selection, u32 magnitude, u64 rank) {
  State& state = *selection.state;
  state.upper = magnitude + 1;
  state.lower = magnitude;
  state.first_between = 0;
  state.between_count = rank;
  keep_threshold(selection, magnitude);
}

// `round` is 0 or 1. Counts the magnitudes in [base, base + 2^bits); the bits above `shift` are the bin.
template <class Source>
TOPKUBE_DEVICE void narrow_bins(const Source& source, const Selection& selection, u32 round, NarrowShared& shared) {
  State& state = *selection.state;
  const u32 base = state.base, bits = state.bits;
  u32* bins = round == 0 ? selection.fine : selection.finest;
  if (bits == 0) {  // only one magnitude is left
    if (round == 1 && gpu::block() == 0 && gpu::thread() == 0) settle(selection, base, state.rank);
    return;
  }
  u32 size, shift = 0;
  if (state.mode == from_candidates) {  // the candidates in the bin of the round before
    shift = bin_shift(bits);
    size = coarse_bins;
    for_each_ahead(
        state.candidates, [&](u64 i) { return selection.values[i]; },
        [&](u32 value, bool inside) {
          const u32 place = (value & Source::mask) - base;  // wraps around below the base
          if (inside && place >> bits == 0) gpu::add(bins + (place >> shift), 1u);
        });
  } else if (round == 0) {  // the upper bits of all data, first in the shared memory of the block
    shift = Source::width - upper_bits;
    size = upper_bins;
    for (u32 i = gpu::thread(); i < size; i += gpu::threads()) shared.bins[i] = 0;
    gpu::sync();
    for_each_ahead(
        selection.length, [&](u64 i) { return source.peek(i); },
        [&](u32 value, bool inside) {
          if (inside) gpu::add(shared.bins + ((value & Source::mask) >> shift), 1u);
        });
    gpu::sync();
    for (u32 i = gpu::thread(); i < size; i += gpu::threads()) {
      if (shared.bins[i]) gpu::add(bins + i, shared.bins[i]);
    }
  } else {  // the lower bits of the data in that bin; lanes with equal bits are counted together
    size = u32{1} << bits;
    for_each_ahead(
        selection.length, [&](u64 i) { return source.peek(i); },
        [&](u32 value, bool inside) {
          const u32 place = inside ? (value & Source::mask) - base : ~u32{0};
          const bool counted = place >> bits == 0;
          if (gpu::ballot(counted) == 0) return;
          const u32 peers = gpu::matching(counted ? place : 0x80000000u | gpu::lane());
          if (counted && gpu::first_bit(peers) == gpu::lane()) gpu::add(bins + place, gpu::popcount(peers));
        });
  }
  if (!is_last_block(state.narrow_done + round, shared.scratch)) return;
  const Bin bin = bin_of_rank(bins, size, state.rank, shared.scratch);
  if (gpu::thread() == 0) {
    state.base = base + (bin.number << shift);
    state.bits = shift;
    state.rank = bin.rank;
    if (round == 1) settle(selection, state.base, bin.rank);
  }
}

template <class Source>
TOPKUBE_KERNEL(narrow_threads) narrow(Source source, Selection selection, u32 round) {
  narrow_bins(source, selection, round, gpu::shared<NarrowShared>());
}

}  // namespace topkube
