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

// So many candidates are counted in shared memory first. Additions to one address of global memory run one after another, and if
// most candidates are equal, all of them have one address.
constexpr u64 many_candidates = 1u << 18;

// Counts what `count` adds to the bins of the block, and adds these bins to the bins of the grid.
template <class Count>
TOPKUBE_DEVICE void count_in_block(u32* bins, u32 size, NarrowShared& shared, const Count& count) {
  for (u32 i = gpu::thread(); i < size; i += gpu::threads()) shared.bins[i] = 0;
  gpu::sync();
  count(shared.bins);
  gpu::sync();
  for (u32 i = gpu::thread(); i < size; i += gpu::threads()) {
    if (shared.bins[i]) gpu::add(bins + i, shared.bins[i]);
  }
}

// A place that a warp met often. The warp counts it in a register, because additions to one address run one after another.
struct FrequentPlace {
  u32 place = ~u32{0}, count = 0;

  // Counts the `counted` places of the lanes. All lanes of the warp call it.
  TOPKUBE_DEVICE_MEMBER void add(u32* bins, u32 own, bool counted) {
    const u32 equal = gpu::ballot(counted && own == place);
    count += gpu::popcount(equal);
    const bool left = counted && own != place;
    const u32 others = gpu::ballot(left);
    if (others == 0) return;
    const u32 peers = gpu::matching(left ? own : 0x80000000u | gpu::lane());
    if (equal == 0) {  // the frequent place did not occur: the first of the others replaces it
      flush(bins);
      const u32 first = gpu::first_bit(others);
      place = gpu::shuffle(own, first);
      count = gpu::popcount(gpu::shuffle(peers, first));
      if (own == place) return;
    }
    if (left && gpu::first_bit(peers) == gpu::lane()) gpu::add(bins + own, gpu::popcount(peers));
  }
  TOPKUBE_DEVICE_MEMBER void flush(u32* bins) const {
    if (count && gpu::lane() == 0) gpu::add(bins + place, count);
  }
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
    const auto count_candidates = [&](u32* to) {
      for_each_ahead(
          state.candidates, [&](u64 i) { return selection.values[i]; },
          [&](u32 value, bool inside) {
            const u32 place = (value & Source::mask) - base;  // wraps around below the base
            add_to_bin(to, place >> shift, inside && place >> bits == 0);
          });
    };
    if (state.candidates < many_candidates) {
      count_candidates(bins);
    } else {
      count_in_block(bins, size, shared, count_candidates);
    }
  } else if (round == 0) {  // the upper bits of all data
    shift = Source::width - upper_bits;
    size = upper_bins;
    count_in_block(bins, size, shared, [&](u32* to) {
      for_each_ahead(
          selection.length, [&](u64 i) { return source.peek(i); },
          [&](u32 value, bool inside) { add_to_bin(to, (value & Source::mask) >> shift, inside); });
    });
  } else {  // the lower bits of the data in that bin, which are too many for shared memory
    size = u32{1} << bits;
    FrequentPlace frequent;
    for_each_ahead(
        selection.length, [&](u64 i) { return source.peek(i); },
        [&](u32 value, bool inside) {
          const u32 place = (value & Source::mask) - base;
          frequent.add(bins, place, inside && place >> bits == 0);
        });
    frequent.flush(bins);
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
