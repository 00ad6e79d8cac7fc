// Selection on the GPU: the same entries as csrc/cpu/selection/select.hpp, bit for bit.
//
// Five kernels run on one stream. Counts and decisions stay on the device, so the sequence of kernels is the same for all data.
//   prepare   clears the workspace; one block samples the data and computes a lower and an upper bound of the k-th magnitude
//   filter    reads the data once, appends the entries that reach the lower bound in order, and counts them in 4,096 bins
//   narrow    runs twice: counts the bin of the k-th magnitude in finer bins, until one magnitude is left
//   collect   writes the candidates above the k-th magnitude, and the first of those that equal it
// If there are too few or too many candidates, or if k is more than a quarter of the data, `narrow` counts the data itself (the
// upper 14 bits, then the rest) and `collect` reads the data. These are four passes at most, as on the CPU.
#pragma once

#include <type_traits>

#include "../cpu/dtype.hpp"
#include "../cpu/selection/sampling.hpp"
#include "block.hpp"

namespace topkube {

// The 2^14 counters of a block need 64 KiB of shared memory, which every device since sm_80 has.
constexpr u32 coarse_bins = 1u << 12, upper_bits = 14, upper_bins = 1u << upper_bits, lower_bins = 1u << (31 - upper_bits);
constexpr u32 filter_threads = 256, collect_threads = 256, narrow_threads = 1024, prepare_threads = 256;
constexpr u32 collect_steps = 16, collect_tile = collect_threads * collect_steps;
constexpr u32 samples_per_thread = 32, most_samples = prepare_threads * samples_per_thread;
static_assert(most_samples < 0x10000);  // two sample counts fit in one word
constexpr u64 everything = 16384;       // up to this length every entry is a candidate

enum Mode : u32 { from_candidates = 0, from_data = 1 };

// Values that the kernels pass to each other. At the end, the host reads from them how much work was done.
struct State {
  u32 mode;
  u32 least, most;   // the bounds of the filter; its bins cover least..most
  u32 base, bits;    // the k-th magnitude is in [base, base + 2^bits)
  u32 upper, lower;  // selects all magnitudes >= upper, and `wanted` of those >= lower, from number `first` on
  u32 filter_ticket, collect_ticket;
  u32 filter_done, narrow_done[2], count_done;
  u64 rank;  // the rank of the k-th magnitude within its bin
  u64 first, wanted;
  u64 candidates;  // entries that reached `least`; more than the capacity if the buffer was full
  u64 above[2];    // mstopk: the number of magnitudes >= upper, and >= lower
  double mean;
  u32 largest;  // mstopk: the largest magnitude as bits of an fp32
  u32 nonfinite;
  float thresholds[2];
};

// The layout of the workspace, and the values that the host computes in advance.
struct Selection {
  u64 length, k;  // k: the rank to find
  u32 mode;       // from_data: k is so large that candidates do not pay off
  u32 samples, low_rank, high_rank;
  u64 stratum, capacity;
  State* state;
  u32* coarse;        // the bins of filter
  u32* fine;          // the bins of the first narrow
  u32* finest;        // the bins of the second narrow
  u64* filtered;      // prefix sums of filter's tiles
  u64* collected[2];  // prefix sums of collect's tiles
  u32* clear;         // all of these must be zero at first
  u64 clear_words;
  u32* indices;  // candidates
  u32* values;
};

// A source returns the bits of element i that are compared, as 32-bit words. `peek` has no side effect. `load` and `finish` are
// separate so that a thread can start many loads before it uses the first value.
template <class T>
struct Bits {
  static constexpr u32 steps = 16, width = sizeof(typename T::Item) == 4 ? 31 : 15, mask = (u32{1} << width) - 1;
  using Item = typename T::Item;
  using Word = std::conditional_t<sizeof(Item) == 4, u32, u16>;
  using Raw = u32;
  const Word* x;
  TOPKUBE_DEVICE_MEMBER u32 peek(u64 i) const { return x[i]; }
  TOPKUBE_DEVICE_MEMBER Raw load(u64 i) const { return x[i]; }
  TOPKUBE_DEVICE_MEMBER u32 finish(u64, Raw raw) const { return raw; }
  static constexpr bool writes = false;
};

// Reads residual + gradient, and writes it to acc in the same pass.
template <class T>
struct Sums {
  static constexpr u32 steps = 16, width = 31, mask = 0x7fffffffu;
  struct Raw {
    typename T::Item gradient;
    float residual;
  };
  const typename T::Item* gradient;
  const float* residual;
  float* acc;
  TOPKUBE_DEVICE_MEMBER u32 peek(u64 i) const { return bits_of(canonical(gpu::plus(residual[i], T::load(gradient[i])))); }
  TOPKUBE_DEVICE_MEMBER Raw load(u64 i) const { return {gradient[i], residual[i]}; }
  TOPKUBE_DEVICE_MEMBER u32 finish(u64 i, Raw raw) const {
    const float sum = canonical(gpu::plus(raw.residual, T::load(raw.gradient)));
    acc[i] = sum;
    return bits_of(sum);
  }
  static constexpr bool writes = true;
};

TOPKUBE_DEVICE u32 bit_width(u32 value) {
  u32 width = 0;
  while (value) {
    value >>= 1;
    ++width;
  }
  return width;
}

template <class Source>
TOPKUBE_KERNEL(prepare_threads) prepare(Source source, Selection s) {
  auto& scratch = gpu::shared<BlockScratch>();
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < s.clear_words; i += u64{gpu::blocks()} * gpu::threads()) {
    s.clear[i] = 0;
  }
  if (gpu::block() != 0) return;
  u32 least = 0, most = Source::mask;
  if (s.samples) {
    u32 sample[samples_per_thread];
#pragma unroll
    for (u32 j = 0; j < samples_per_thread; ++j) {
      const u64 i = gpu::thread() + u64{j} * gpu::threads();
      // An unused place counts as the smallest magnitude, which reaches only a bound of 0.
      sample[j] = i < s.samples ? source.peek(sample_position(i, s.stratum)) & Source::mask : 0;
    }
    // Finds, bit by bit, the magnitudes that `low_rank` and `high_rank` samples reach.
    u32 low = 0, high = 0, above_low = most_samples, above_high = s.high_rank ? most_samples : 0;
    for (u32 bit = Source::width; bit-- > 0 && (above_low > s.low_rank || above_high > s.high_rank);) {
      const u32 try_low = low | u32{1} << bit, try_high = high | u32{1} << bit;
      u32 reached = 0;
#pragma unroll
      for (u32 j = 0; j < samples_per_thread; ++j) {
        reached += (sample[j] >= try_low ? 1u : 0u) + (sample[j] >= try_high ? 0x10000u : 0u);
      }
      reached = block_total(reached, scratch);
      const u32 reach_low = reached & 0xffffu, reach_high = reached >> 16;
      if (reach_low >= s.low_rank) low = try_low, above_low = reach_low;
      if (reach_high >= s.high_rank) high = try_high, above_high = reach_high;
    }
    least = low;
    if (s.high_rank) most = high;
  }
  if (gpu::thread() == 0) {
    State state{};
    state.mode = s.mode;
    state.least = least;
    state.most = most;
    state.rank = s.k;
    state.bits = Source::width;
    *s.state = state;
  }
}

TOPKUBE_DEVICE u32 above_digit(u32 bits) { return bits > 12 ? bits - 12 : 0; }

struct FilterShared {
  BlockScratch scratch;
  u64 offset;
};

template <class Source>
TOPKUBE_KERNEL(filter_threads) filter(Source source, Selection s) {
  constexpr u32 warp_items = 32 * Source::steps, tile_items = warp_items * (filter_threads / 32);
  auto& shared = gpu::shared<FilterShared>();
  State& state = *s.state;
  const u32 tile = take_tile(&state.filter_ticket, shared.scratch), lane = gpu::lane();
  const u64 base = u64{tile} * tile_items + u64{gpu::warp()} * warp_items;
  const u32 here = base >= s.length ? 0 : s.length - base < warp_items ? static_cast<u32>(s.length - base) : warp_items;

  typename Source::Raw raw[Source::steps];
  u32 value[Source::steps];
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    if (32 * j + lane < here) raw[j] = source.load(base + 32 * j + lane);
  }
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    value[j] = 32 * j + lane < here ? source.finish(base + 32 * j + lane, raw[j]) : 0;
  }
  if (s.mode == from_data) return;

  const u32 least = state.least, most = state.most, shift = above_digit(bit_width(most - least));
  u32 mine = 0;
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    mine += gpu::popcount(gpu::ballot(32 * j + lane < here && (value[j] & Source::mask) >= least));
  }
  u64 total;
  const u64 before = warps_before(mine, shared.scratch, &total);
  if (gpu::warp() == 0) {
    const u64 offset = look_back(s.filtered, tile, total);
    if (lane == 0) shared.offset = offset;
  }
  gpu::sync();
  u64 offset = shared.offset + before;
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    const u32 magnitude = value[j] & Source::mask;
    const bool taken = 32 * j + lane < here && magnitude >= least;
    const u32 votes = gpu::ballot(taken);
    if (votes == 0) continue;
    const u64 at = offset + gpu::popcount(votes & ((u32{1} << lane) - 1));
    const bool fits = taken && at < s.capacity;
    const bool binned = fits && magnitude <= most;
    const u32 bin = (magnitude - least) >> shift;
    if (fits) {
      s.indices[at] = static_cast<u32>(base + 32 * j + lane);
      s.values[at] = value[j];
    }
    offset += gpu::popcount(votes);
    if (gpu::popcount(votes) < 8) {
      if (binned) gpu::add(s.coarse + bin, 1u);
    } else {  // many equal values would wait for one counter
      const u32 peers = gpu::matching(binned ? bin : 0x80000000u | lane);
      if (binned && gpu::first_bit(peers) == lane) gpu::add(s.coarse + bin, gpu::popcount(peers));
    }
  }

  if (!is_last_block(&state.filter_done, shared.scratch)) return;
  const u64 count = gpu::observe(s.filtered + gpu::blocks() - 1) & sum_mask;
  u64 binned = 0;
  for (u32 i = gpu::thread(); i < coarse_bins; i += gpu::threads()) binned += gpu::observe(s.coarse + i);
  const u64 beyond = count - block_sum(binned, shared.scratch), rank = state.rank;
  const bool enough = count <= s.capacity && rank <= count && rank > beyond;
  if (enough) {
    const Bin bin = bin_of_rank(s.coarse, coarse_bins, rank - beyond, shared.scratch);
    if (gpu::thread() == 0) {
      state.base = least + (bin.number << shift);
      state.bits = shift;
      state.rank = bin.rank;
    }
  }
  if (gpu::thread() == 0) {
    state.mode = enough ? from_candidates : from_data;
    state.candidates = count;
  }
}

struct NarrowShared {
  BlockScratch scratch;
  u32 bins[upper_bins];
};

// The k-th magnitude is known: selects all magnitudes above it, and `rank` of those that equal it.
TOPKUBE_DEVICE void settle(State& state, u32 magnitude, u64 rank) {
  state.upper = magnitude + 1;
  state.lower = magnitude;
  state.first = 0;
  state.wanted = rank;
}

// `round` is 0 or 1. Counts the magnitudes in [base, base + 2^bits); the bits above `shift` are the bin.
template <class Source>
TOPKUBE_KERNEL(narrow_threads) narrow(Source source, Selection s, u32 round) {
  auto& shared = gpu::shared<NarrowShared>();
  State& state = *s.state;
  const u32 base = state.base, bits = state.bits;
  const u64 start = u64{gpu::block()} * gpu::threads() + gpu::thread(), stride = u64{gpu::blocks()} * gpu::threads();
  u32* bins = round == 0 ? s.fine : s.finest;
  if (bits == 0) {  // only one magnitude is left
    if (round == 1 && start == 0) settle(state, base, state.rank);
    return;
  }
  u32 size, shift = 0;
  if (state.mode == from_candidates) {
    shift = above_digit(bits);
    size = coarse_bins;
    for (u64 i = start; i < state.candidates; i += stride) {
      const u32 place = (s.values[i] & Source::mask) - base;  // wraps around below the base
      if (place >> bits == 0) gpu::add(bins + (place >> shift), 1u);
    }
  } else if (round == 0) {
    shift = Source::width - upper_bits;
    size = upper_bins;
    for (u32 i = gpu::thread(); i < size; i += gpu::threads()) shared.bins[i] = 0;
    gpu::sync();
    for (u64 i = start; i < s.length; i += stride) gpu::add(shared.bins + ((source.peek(i) & Source::mask) >> shift), 1u);
    gpu::sync();
    for (u32 i = gpu::thread(); i < size; i += gpu::threads()) {
      if (shared.bins[i]) gpu::add(bins + i, shared.bins[i]);
    }
  } else {
    size = u32{1} << bits;
    for (u64 first = start - gpu::lane(); first < s.length; first += stride) {  // whole warps, for `matching`
      const u64 i = first + gpu::lane();
      const u32 place = i < s.length ? (source.peek(i) & Source::mask) - base : ~u32{0};
      const bool counted = place >> bits == 0;
      if (gpu::ballot(counted) == 0) continue;
      const u32 peers = gpu::matching(counted ? place : 0x80000000u | gpu::lane());
      if (counted && gpu::first_bit(peers) == gpu::lane()) gpu::add(bins + place, gpu::popcount(peers));
    }
  }
  if (!is_last_block(state.narrow_done + round, shared.scratch)) return;
  const Bin bin = bin_of_rank(bins, size, state.rank, shared.scratch);
  if (gpu::thread() == 0) {
    state.base = base + (bin.number << shift);
    state.bits = shift;
    state.rank = bin.rank;
    if (round == 1) settle(state, state.base, bin.rank);
  }
}

struct CollectShared {
  BlockScratch scratch;
  u64 offsets[2];
};

// Writes, in order, every entry >= upper, and of the other entries >= lower those with numbers in [first, first + wanted). If
// `acc` is not null, these entries become zero in it.
template <class Source, class Value>
TOPKUBE_KERNEL(collect_threads) collect(Source source, Selection s, u32* indices, Value* values, float* acc) {
  auto& shared = gpu::shared<CollectShared>();
  State& state = *s.state;
  const bool data = state.mode == from_data;
  const u64 length = data ? s.length : state.candidates;
  const u32 upper = state.upper, lower = state.lower, lane = gpu::lane();
  const u64 first = state.first, wanted = state.wanted;
  for (;;) {
    const u32 tile = take_tile(&state.collect_ticket, shared.scratch);
    if (u64{tile} * collect_tile >= length) return;
    const u64 base = u64{tile} * collect_tile + gpu::warp() * (32 * collect_steps) + lane;
    u32 value[collect_steps];
    u64 mine = 0;  // the entries above in the lower half, the entries between in the upper half
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u64 i = base + 32 * j;
      value[j] = i >= length ? 0 : data ? source.peek(i) : s.values[i];
    }
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u32 magnitude = value[j] & Source::mask;
      const bool inside = base + 32 * j < length, above = inside && magnitude >= upper;
      mine += gpu::popcount(gpu::ballot(above));
      mine += u64{gpu::popcount(gpu::ballot(inside && !above && magnitude >= lower))} << 32;
    }
    u64 total;
    u64 before = warps_before(mine, shared.scratch, &total);
    if (gpu::warp() == 0) {
      const u64 aboves = look_back(s.collected[0], tile, total & 0xffffffffu);
      const u64 betweens = look_back(s.collected[1], tile, total >> 32);
      if (lane == 0) {
        shared.offsets[0] = aboves;
        shared.offsets[1] = betweens;
      }
    }
    gpu::sync();
    u64 aboves = shared.offsets[0] + (before & 0xffffffffu), betweens = shared.offsets[1] + (before >> 32);
    const u32 below = (u32{1} << lane) - 1;
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u64 i = base + 32 * j;
      const u32 magnitude = value[j] & Source::mask;
      const bool inside = i < length, above = inside && magnitude >= upper, between = inside && !above && magnitude >= lower;
      const u32 above_votes = gpu::ballot(above), between_votes = gpu::ballot(between);
      const u64 number = betweens + gpu::popcount(between_votes & below);  // the number of entries between that come before
      if (above || (between && number >= first && number - first < wanted)) {
        const u64 taken = number <= first ? 0 : number - first < wanted ? number - first : wanted;
        const u64 at = aboves + gpu::popcount(above_votes & below) + taken;
        const u32 index = data ? static_cast<u32>(i) : s.indices[i];
        indices[at] = index;
        values[at] = static_cast<Value>(value[j]);
        if (acc) acc[index] = 0.0f;
      }
      aboves += gpu::popcount(above_votes);
      betweens += gpu::popcount(between_votes);
    }
  }
}

}  // namespace topkube
