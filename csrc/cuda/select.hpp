// Selection on the GPU: the same entries as csrc/cpu/selection/select.hpp, bit for bit.
//
// Five kernels run on one stream. Counts and decisions stay on the device, so the sequence of kernels is the same for all data.
//   prepare   clears the workspace; one block samples the data and computes a lower and an upper bound of the k-th magnitude
//   filter    reads the data once, appends the entries that reach the lower bound in order, and counts them in 4,096 bins
//   narrow    runs twice: counts the bin of the k-th magnitude in finer bins, until one magnitude is left
//   collect   writes the candidates above the k-th magnitude, and the first of those that equal it
// A variant of the build replaces the look-back of `filter` (TOPKUBE_CUDA_SEGMENTS): a tile reserves a segment of the candidates with
// one atomic addition, whichever tiles come before it. `place_rank` then does what the last block of `filter` does otherwise, and
// `collect` reads the segments in the order of their tiles.
// If there are too few or too many candidates, or if k is more than a quarter of the data, `narrow` counts the data itself (the
// upper 14 bits, then the rest) and `collect` reads the data. These are four passes at most, as on the CPU.
#pragma once

#include <type_traits>

#include "../cpu/dtype.hpp"
#include "../cpu/selection/sampling.hpp"
#include "block.hpp"

namespace topkube {

// Variants that a build can choose (-DTOPKUBE_CUDA_DEFINES="-DTOPKUBE_CUDA_VECTOR=0"), to compare them on a device. They return the
// same bits.
#ifndef TOPKUBE_CUDA_VECTOR
#define TOPKUBE_CUDA_VECTOR 1  // load 16 bytes per instruction, if arrays are aligned
#endif
#ifndef TOPKUBE_CUDA_AHEAD
#define TOPKUBE_CUDA_AHEAD 8  // loads in flight per thread in `narrow`
#endif
#ifndef TOPKUBE_CUDA_SEGMENTS
#define TOPKUBE_CUDA_SEGMENTS 0  // tiles of `filter` append candidates without waiting for one another
#endif
constexpr bool vector_loads = TOPKUBE_CUDA_VECTOR != 0;
constexpr bool segments = TOPKUBE_CUDA_SEGMENTS != 0;
constexpr u32 narrow_ahead = TOPKUBE_CUDA_AHEAD;

constexpr u32 filter_steps = 16;  // items per thread in `filter`
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
static_assert(sizeof(State) <= 256);  // the size that topkube/kernels allocates

// The layout of the workspace, and the values that the host computes in advance.
struct Selection {
  u64 length, k;  // k: the rank to find
  u32 mode;       // from_data: k is so large that candidates do not pay off
  bool aligned;   // all arrays that `filter` reads and writes are aligned to 16 bytes
  u32 samples, low_rank, high_rank;
  u64 stratum, capacity;
  State* state;
  u32* coarse;        // the bins of filter
  u32* fine;          // the bins of the first narrow
  u32* finest;        // the bins of the second narrow
  u64* filtered;      // prefix sums of filter's tiles; or of each tile the start of its segment << 16 | its size
  u64 tiles;          // of filter
  u32 group;          // segments that a block of `collect` reads at a time, a multiple of its warps
  u64* collected[2];  // prefix sums of collect's tiles
  u32* clear;         // all of these must be zero at first
  u64 clear_words;
  u32* indices;  // candidates
  u32* values;
};

// A source returns the bits of element i that are compared, as 32-bit words. `peek` has no side effect. Loads and `finish` are
// separate so that a thread can start many loads before it uses the first value. `load_pack` loads 16 bytes at once (of a 16-bit
// gradient, 8).
template <class T>
struct Bits {
  using Item = typename T::Item;
  using Word = std::conditional_t<sizeof(Item) == 4, u32, u16>;
  static constexpr u32 width = sizeof(Item) == 4 ? 31 : 15, mask = (u32{1} << width) - 1;
  static constexpr u32 pack = 16 / sizeof(Word), steps = filter_steps, chunks = steps / pack;
  struct alignas(16) Raw {
    Word words[pack];
  };
  const Word* x;
  TOPKUBE_DEVICE_MEMBER u32 peek(u64 i) const { return x[i]; }
  TOPKUBE_DEVICE_MEMBER Raw load_pack(u64 i) const { return *reinterpret_cast<const Raw*>(x + i); }
  TOPKUBE_DEVICE_MEMBER void load(u64 i, Raw& raw, u32 place) const { raw.words[place] = x[i]; }
  TOPKUBE_DEVICE_MEMBER u32 finish(const Raw& raw, u32 place) const { return raw.words[place]; }
  TOPKUBE_DEVICE_MEMBER void store_pack(u64, const u32*) const {}
  TOPKUBE_DEVICE_MEMBER void store(u64, u32) const {}
  static constexpr bool writes = false;
};

// Reads residual + gradient, and writes it to acc in the same pass.
template <class T>
struct Sums {
  using Item = typename T::Item;
  static constexpr u32 width = 31, mask = 0x7fffffffu, pack = 4, steps = filter_steps, chunks = steps / pack;
  struct alignas(pack * sizeof(Item)) Gradients {
    Item items[pack];
  };
  struct alignas(16) Floats {
    float items[pack];
  };
  struct Raw {
    Gradients gradient;
    Floats residual;
  };
  const Item* gradient;
  const float* residual;
  float* acc;
  TOPKUBE_DEVICE_MEMBER static u32 sum(Item gradient, float residual) {
    return bits_of(canonical(gpu::plus(residual, T::load(gradient))));
  }
  TOPKUBE_DEVICE_MEMBER u32 peek(u64 i) const { return sum(gradient[i], residual[i]); }
  TOPKUBE_DEVICE_MEMBER Raw load_pack(u64 i) const {
    return {*reinterpret_cast<const Gradients*>(gradient + i), *reinterpret_cast<const Floats*>(residual + i)};
  }
  TOPKUBE_DEVICE_MEMBER void load(u64 i, Raw& raw, u32 place) const {
    raw.gradient.items[place] = gradient[i];
    raw.residual.items[place] = residual[i];
  }
  TOPKUBE_DEVICE_MEMBER u32 finish(const Raw& raw, u32 place) const {
    return sum(raw.gradient.items[place], raw.residual.items[place]);
  }
  TOPKUBE_DEVICE_MEMBER void store_pack(u64 i, const u32* values) const {
    Floats sums;
#pragma unroll
    for (u32 j = 0; j < pack; ++j) sums.items[j] = float_of(values[j]);
    *reinterpret_cast<Floats*>(acc + i) = sums;
  }
  TOPKUBE_DEVICE_MEMBER void store(u64 i, u32 value) const { acc[i] = float_of(value); }
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

// A warp reads chunks of 32 packs. Lane i has pack i of every chunk, so its items of a chunk are neighbours. Returns the position
// of this lane's item j among the items of the warp.
template <class Source>
TOPKUBE_DEVICE u32 item_position(u32 j) {
  return j / Source::pack * (32 * Source::pack) + gpu::lane() * Source::pack + j % Source::pack;
}

// Reads this lane's items from element `base` on, and writes the sums of a source that writes. Items beyond `here` are 0. If `whole`,
// all items of the warp exist and all arrays are aligned to 16 bytes.
template <class Source>
TOPKUBE_DEVICE void read_items(const Source& source, u64 base, u32 here, bool whole, u32 (&value)[Source::steps]) {
  typename Source::Raw raw[Source::chunks];
  if (vector_loads && whole) {
#pragma unroll
    for (u32 c = 0; c < Source::chunks; ++c) raw[c] = source.load_pack(base + item_position<Source>(c * Source::pack));
#pragma unroll
    for (u32 j = 0; j < Source::steps; ++j) value[j] = source.finish(raw[j / Source::pack], j % Source::pack);
#pragma unroll
    for (u32 c = 0; c < Source::chunks; ++c) {
      source.store_pack(base + item_position<Source>(c * Source::pack), value + c * Source::pack);
    }
    return;
  }
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    if (item_position<Source>(j) < here) source.load(base + item_position<Source>(j), raw[j / Source::pack], j % Source::pack);
  }
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    value[j] = item_position<Source>(j) < here ? source.finish(raw[j / Source::pack], j % Source::pack) : 0;
    if (item_position<Source>(j) < here) source.store(base + item_position<Source>(j), value[j]);
  }
}

// Where the taken items of a warp go: in the order of their positions. Each lane counts its items of each chunk, and one
// prefix sum over the warp adds all these counts at once, in the parts of a word. A count is at most 256.
template <class Source>
struct Places {
  static_assert(Source::chunks <= 4 && 32 * Source::pack < 0x10000);
  u64 lanes_before, chunks_before;
  u32 all;
  TOPKUBE_DEVICE_MEMBER explicit Places(u32 taken) {
    constexpr u32 pack_mask = (u32{1} << Source::pack) - 1;
    u64 counts = 0;
#pragma unroll
    for (u32 c = 0; c < Source::chunks; ++c) counts |= u64{gpu::popcount(taken >> (c * Source::pack) & pack_mask)} << (16 * c);
    u64 sums = counts;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u64 below = gpu::shuffle(sums, (gpu::lane() - step) & 31u);
      if (gpu::lane() >= step) sums += below;
    }
    lanes_before = sums - counts;
    const u64 totals = gpu::shuffle(sums, 31u);
    chunks_before = (totals << 16) + (totals << 32) + (totals << 48);
    all = static_cast<u32>((chunks_before >> 48) + (totals >> 48));
  }
  // Returns how many taken items of the warp come before this lane's item j.
  TOPKUBE_DEVICE_MEMBER u32 before(u32 taken, u32 j) const {
    const u32 c = j / Source::pack, own = taken >> (c * Source::pack) & ((u32{1} << j % Source::pack) - 1);
    return static_cast<u32>((chunks_before >> (16 * c) & 0xffffu) + (lanes_before >> (16 * c) & 0xffffu)) + gpu::popcount(own);
  }
};

// All threads of a block find the bin of the k-th magnitude among `count` candidates, and decide if the candidates are sufficient.
TOPKUBE_DEVICE void choose_bin(const Selection& s, u64 count, BlockScratch& scratch) {
  State& state = *s.state;
  const u32 least = state.least, shift = above_digit(bit_width(state.most - least));
  u64 binned = 0;
  for (u32 i = gpu::thread(); i < coarse_bins; i += gpu::threads()) binned += gpu::observe(s.coarse + i);
  const u64 beyond = count - block_sum(binned, scratch), rank = state.rank;
  const bool enough = count <= s.capacity && rank <= count && rank > beyond;
  if (enough) {
    const Bin bin = bin_of_rank(s.coarse, coarse_bins, rank - beyond, scratch);
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

template <class Source>
TOPKUBE_KERNEL(filter_threads) filter(Source source, Selection s) {
  constexpr u32 warp_items = 32 * Source::steps, tile_items = warp_items * (filter_threads / 32);
  auto& shared = gpu::shared<FilterShared>();
  State& state = *s.state;
  const u32 tile = segments ? gpu::block() : take_tile(&state.filter_ticket, shared.scratch), lane = gpu::lane();
  const u64 base = u64{tile} * tile_items + u64{gpu::warp()} * warp_items;
  const u32 here = base >= s.length ? 0 : s.length - base < warp_items ? static_cast<u32>(s.length - base) : warp_items;

  u32 value[Source::steps];
  read_items(source, base, here, s.aligned && here == warp_items, value);
  if (s.mode == from_data) return;

  const u32 least = state.least, most = state.most, shift = above_digit(bit_width(most - least));
  u32 taken = 0;
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    taken |= (item_position<Source>(j) < here && (value[j] & Source::mask) >= least ? 1u : 0u) << j;
  }
  const Places<Source> places(taken);
  u64 total;
  const u64 before = warps_before(places.all, shared.scratch, &total);
  if constexpr (segments) {
    static_assert(tile_items < 0x10000);
    if (gpu::thread() == 0) {
      shared.offset = gpu::add(&state.candidates, total);
      s.filtered[tile] = shared.offset << 16 | total;
    }
  } else if (gpu::warp() == 0) {
    const u64 offset = look_back(s.filtered, tile, total);
    if (lane == 0) shared.offset = offset;
  }
  gpu::sync();
  const u64 offset = shared.offset + before;
  const bool crowded = places.all >= 8 * Source::steps;  // many equal values would wait for one counter
  if (places.all != 0) {
#pragma unroll
    for (u32 j = 0; j < Source::steps; ++j) {
      const u32 magnitude = value[j] & Source::mask, bin = (magnitude - least) >> shift;
      bool binned = false;
      if (taken >> j & 1) {
        const u64 at = offset + places.before(taken, j);
        binned = at < s.capacity && magnitude <= most;
        if (at < s.capacity) {
          s.indices[at] = static_cast<u32>(base + item_position<Source>(j));
          s.values[at] = value[j];
        }
        if (binned && !crowded) gpu::add(s.coarse + bin, 1u);
      }
      if (crowded) {
        const u32 peers = gpu::matching(binned ? bin : 0x80000000u | lane);
        if (binned && gpu::first_bit(peers) == lane) gpu::add(s.coarse + bin, gpu::popcount(peers));
      }
    }
  }

  if (segments || !is_last_block(&state.filter_done, shared.scratch)) return;
  choose_bin(s, gpu::observe(s.filtered + gpu::blocks() - 1) & sum_mask, shared.scratch);
}

// Runs as one block, after `filter` with segments.
TOPKUBE_KERNEL(narrow_threads) place_rank(Selection s) {
  auto& shared = gpu::shared<FilterShared>();
  choose_bin(s, s.state->candidates, shared.scratch);
}

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
  u32* bins = round == 0 ? s.fine : s.finest;
  if (bits == 0) {  // only one magnitude is left
    if (round == 1 && gpu::block() == 0 && gpu::thread() == 0) settle(state, base, state.rank);
    return;
  }
  u32 size, shift = 0;
  if (state.mode == from_candidates) {
    shift = above_digit(bits);
    size = coarse_bins;
    for_each_ahead(
        state.candidates, [&](u64 i) { return s.values[i]; },
        [&](u32 value, bool inside) {
          const u32 place = (value & Source::mask) - base;  // wraps around below the base
          if (inside && place >> bits == 0) gpu::add(bins + (place >> shift), 1u);
        });
  } else if (round == 0) {
    shift = Source::width - upper_bits;
    size = upper_bins;
    for (u32 i = gpu::thread(); i < size; i += gpu::threads()) shared.bins[i] = 0;
    gpu::sync();
    for_each_ahead(
        s.length, [&](u64 i) { return source.peek(i); },
        [&](u32 value, bool inside) {
          if (inside) gpu::add(shared.bins + ((value & Source::mask) >> shift), 1u);
        });
    gpu::sync();
    for (u32 i = gpu::thread(); i < size; i += gpu::threads()) {
      if (shared.bins[i]) gpu::add(bins + i, shared.bins[i]);
    }
  } else {
    size = u32{1} << bits;
    for_each_ahead(
        s.length, [&](u64 i) { return source.peek(i); },
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
    if (round == 1) settle(state, state.base, bin.rank);
  }
}

struct CollectShared {
  BlockScratch scratch;
  u64 offsets[2];
};

// Publishes how many entries above (the lower half of `own`) and between (the upper half) a tile has. Returns through
// `shared.offsets` how many the tiles before it have. Every thread of the block calls it, and can then read the offsets.
TOPKUBE_DEVICE void look_back_twice(const Selection& s, u32 tile, u64 own, CollectShared& shared) {
  if (gpu::warp() == 0) {
    const u64 aboves = look_back(s.collected[0], tile, own & 0xffffffffu);
    const u64 betweens = look_back(s.collected[1], tile, own >> 32);
    if (gpu::lane() == 0) {
      shared.offsets[0] = aboves;
      shared.offsets[1] = betweens;
    }
  }
  gpu::sync();
}

// The rule by which entries are written, and where to: every entry >= upper, and of the other entries >= lower those with numbers in
// [first, first + wanted). A warp passes its entries in order, 32 at a time. `aboves` and `betweens` count those before.
struct Writer {
  u32 upper, lower;
  u64 first, wanted, aboves, betweens;
  template <class Write>
  TOPKUBE_DEVICE_MEMBER void pass(bool inside, u32 magnitude, const Write& write) {
    const u32 below = (u32{1} << gpu::lane()) - 1;
    const bool above = inside && magnitude >= upper, between = inside && !above && magnitude >= lower;
    const u32 above_votes = gpu::ballot(above), between_votes = gpu::ballot(between);
    const u64 number = betweens + gpu::popcount(between_votes & below);  // the number of entries between that come before
    if (above || (between && number >= first && number - first < wanted)) {
      const u64 taken = number <= first ? 0 : number - first < wanted ? number - first : wanted;
      write(aboves + gpu::popcount(above_votes & below) + taken);
    }
    aboves += gpu::popcount(above_votes);
    betweens += gpu::popcount(between_votes);
  }
};

// Does the work of `collect` on candidates in segments. A block takes `s.group` segments at a time, and a warp of the block the same
// number of consecutive segments.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_segments(const Selection& s, u32* indices, Value* values, float* acc, CollectShared& shared) {
  State& state = *s.state;
  const u32 upper = state.upper, lower = state.lower, lane = gpu::lane(), each = s.group / (collect_threads / 32);
  const u64 wanted_first = state.first, wanted = state.wanted;
  for (;;) {
    const u32 group = take_tile(&state.collect_ticket, shared.scratch);
    if (u64{group} * s.group >= s.tiles) return;
    const u64 first = u64{group} * s.group + gpu::warp() * each, end = first + each < s.tiles ? first + each : s.tiles;
    u64 mine = 0;  // the entries above in the lower half, the entries between in the upper half
    for (u64 tile = first; tile < end; ++tile) {
      const u64 start = s.filtered[tile] >> 16, size = s.filtered[tile] & 0xffffu;
#pragma unroll 4
      for (u64 i = lane; i < size; i += 32) {
        const u32 magnitude = s.values[start + i] & Source::mask;
        mine += magnitude >= upper ? u64{1} : magnitude >= lower ? u64{1} << 32 : u64{0};
      }
    }
    u64 total;
    const u64 before = warps_before(warp_sum(mine), shared.scratch, &total);
    look_back_twice(s, group, total, shared);
    Writer writer{
        upper, lower, wanted_first, wanted, shared.offsets[0] + (before & 0xffffffffu), shared.offsets[1] + (before >> 32)};
    for (u64 tile = first; tile < end; ++tile) {
      const u64 start = s.filtered[tile] >> 16, size = s.filtered[tile] & 0xffffu;
      for (u64 i = lane; i - lane < size; i += 32) {
        const u32 value = i < size ? s.values[start + i] : 0;
        writer.pass(i < size, value & Source::mask, [&](u64 at) {
          const u32 index = s.indices[start + i];
          indices[at] = index;
          values[at] = static_cast<Value>(value);
          if (acc) acc[index] = 0.0f;
        });
      }
    }
  }
}

// Writes, in order, every entry >= upper, and of the other entries >= lower those with numbers in [first, first + wanted). If
// `acc` is not null, these entries become zero in it.
template <class Source, class Value>
TOPKUBE_KERNEL(collect_threads) collect(Source source, Selection s, u32* indices, Value* values, float* acc) {
  auto& shared = gpu::shared<CollectShared>();
  State& state = *s.state;
  const bool data = state.mode == from_data;
  if (segments && !data) {
    collect_segments<Source>(s, indices, values, acc, shared);
    return;
  }
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
    const u64 before = warps_before(mine, shared.scratch, &total);
    look_back_twice(s, tile, total, shared);
    Writer writer{upper, lower, first, wanted, shared.offsets[0] + (before & 0xffffffffu), shared.offsets[1] + (before >> 32)};
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u64 i = base + 32 * j;
      writer.pass(i < length, value[j] & Source::mask, [&](u64 at) {
        const u32 index = data ? static_cast<u32>(i) : s.indices[i];
        indices[at] = index;
        values[at] = static_cast<Value>(value[j]);
        if (acc) acc[index] = 0.0f;
      });
    }
  }
}

}  // namespace topkube
