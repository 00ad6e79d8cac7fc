// `filter`: reads the data once, and appends the entries that reach the lower bound.
//
// A warp has a tile at a time. It notes the positions of the tile's candidates in shared memory, reserves a segment for them with
// one atomic addition, and copies them there in order. The segments are in any order: `collect` finds them through a table.
#pragma once

#include "histogram_rank.hpp"
#include "prepare.hpp"

namespace topkube {

// Returns how far numbers with so many bits are shifted right so that at most 2^12 bins are left.
TOPKUBE_DEVICE u32 bin_shift(u32 bits) { return bits > coarse_bits ? bits - coarse_bits : 0; }

struct FilterShared {
  BlockScratch scratch;
  u32 bins[coarse_bins];
  u16 positions[filter_threads / 32][filter_tile];  // of the candidates in the tile of each warp
};

// A warp reads rounds of `chunks` chunks, and a chunk is 32 packs. Lane i has pack i of every chunk, so its items of a chunk are
// neighbours. Returns the position of this lane's item j among the items of the round.
template <class Source>
TOPKUBE_DEVICE u32 item_position(u32 j) {
  return j / Source::pack * (32 * Source::pack) + gpu::lane() * Source::pack + j % Source::pack;
}

// The items of one round, from element `base` on. The constructor starts the loads, and `finish` waits for them.
template <class Source>
struct Round {
  static constexpr u32 items = 32 * Source::steps;
  u64 base;
  u32 available;  // how many of the items exist
  bool whole;     // all exist, and all arrays are aligned to 16 bytes
  typename Source::Raw raw[Source::chunks];

  TOPKUBE_DEVICE_MEMBER Round(const Source& source, const Selection& selection, u64 first) : base(first) {
    available = base >= selection.length ? 0 : selection.length - base < items ? static_cast<u32>(selection.length - base) : items;
    whole = vector_loads && selection.aligned && available == items;
    if (whole) {
#pragma unroll
      for (u32 c = 0; c < Source::chunks; ++c) raw[c] = source.load_pack(base + item_position<Source>(c * Source::pack));
      return;
    }
#pragma unroll
    for (u32 j = 0; j < Source::steps; ++j) {
      const u32 position = item_position<Source>(j);
      if (position < available) source.load(base + position, raw[j / Source::pack], j % Source::pack);
    }
  }

  // Writes the sums of a source that writes. Returns a word whose bit j is set if the magnitude of item j is at least `least`.
  TOPKUBE_DEVICE_MEMBER u32 finish(const Source& source, u32 least) const {
    u32 taken = 0;
    if (whole) {
#pragma unroll
      for (u32 c = 0; c < Source::chunks; ++c) {
        u32 values[Source::pack];
#pragma unroll
        for (u32 j = 0; j < Source::pack; ++j) {
          values[j] = source.finish(raw[c], j);
          if ((values[j] & Source::mask) >= least) taken |= u32{1} << (c * Source::pack + j);
        }
        source.store_pack(base + item_position<Source>(c * Source::pack), values);
      }
      return taken;
    }
#pragma unroll
    for (u32 j = 0; j < Source::steps; ++j) {
      const u32 position = item_position<Source>(j);
      if (position >= available) continue;
      const u32 value = source.finish(raw[j / Source::pack], j % Source::pack);
      source.store(base + position, value);
      if ((value & Source::mask) >= least) taken |= u32{1} << j;
    }
    return taken;
  }
};

// Appends the positions of a round's taken items to the `count` positions of the tile, in order. `first`: the position of the
// round in the tile. Returns how many positions the tile has then. One prefix sum over the warp places the items of all chunks at
// once: a part of the word counts the items of a chunk, at most 32 * pack.
template <class Source>
TOPKUBE_DEVICE u32 append_positions(u32 taken, u32 first, u16* positions, u32 count) {
  using Counts = std::conditional_t<Source::pack == 4, u32, u64>;
  constexpr u32 part_bits = sizeof(Counts) * 8 / Source::chunks;
  constexpr Counts part_mask = (Counts{1} << part_bits) - 1;
  constexpr u32 pack_mask = (u32{1} << Source::pack) - 1;
  static_assert(32 * Source::pack <= part_mask);
  Counts own = 0;
#pragma unroll
  for (u32 c = 0; c < Source::chunks; ++c) {
    own |= static_cast<Counts>(gpu::popcount(taken >> (c * Source::pack) & pack_mask)) << (c * part_bits);
  }
  const Counts up_to_lane = sum_up_to_lane(own), totals = gpu::shuffle(up_to_lane, 31u), before_lane = up_to_lane - own;
#pragma unroll
  for (u32 c = 0; c < Source::chunks; ++c) {
    u16* to = positions + count + static_cast<u32>(before_lane >> (c * part_bits) & part_mask);
    for (u32 left = taken >> (c * Source::pack) & pack_mask; left; left &= left - 1) {
      *to++ = static_cast<u16>(first + item_position<Source>(c * Source::pack) + gpu::first_bit(left));
    }
    count += static_cast<u32>(totals >> (c * part_bits) & part_mask);
  }
  return count;
}

// Appends the `count` candidates of a tile, which begins at element `base`, as one segment. Counts in `bins` those that are at most
// `most`.
template <class Source>
TOPKUBE_DEVICE void append_segment(const Source& source, const Selection& selection, u64 tile, const u16* positions, u32 count,
                                   u32 least, u32 most, u32* bins) {
  const u32 lane = gpu::lane(), shift = bin_shift(bit_width(most - least));
  const u64 base = tile * filter_tile;
  u64 offset = 0;
  if (lane == 0) {
    if (count) offset = gpu::add(&selection.state->candidates, u64{count});
    selection.segments[tile] = offset << 16 | count;
  }
  offset = gpu::shuffle(offset, 0u);
  gpu::sync_warp();  // the positions and the sums of the other lanes are written
  for (u32 i = lane; i < count && offset + i < selection.capacity; i += 32) {
    const u64 element = base + positions[i];
    const u32 value = source.reload(element), magnitude = value & Source::mask;
    selection.indices[offset + i] = static_cast<u32>(element);
    selection.values[offset + i] = value;
    if (magnitude <= most) gpu::add(bins + ((magnitude - least) >> shift), 1u);
  }
  gpu::sync_warp();  // the next tile overwrites the positions
}

// All threads of a block find the bin of the k-th magnitude among `count` candidates, and decide if the candidates are sufficient.
TOPKUBE_DEVICE void choose_bin(const Selection& selection, u64 count, BlockScratch& scratch) {
  State& state = *selection.state;
  const u32 least = state.least, shift = bin_shift(bit_width(state.most - least));
  u64 binned = 0;  // the candidates up to the upper bound; the others have no bin
  for (u32 i = gpu::thread(); i < coarse_bins; i += gpu::threads()) binned += gpu::observe(selection.coarse + i);
  const u64 beyond = count - block_sum(binned, scratch), rank = state.rank;
  const bool enough = count <= selection.capacity && rank <= count && rank > beyond;
  if (enough) {
    const Bin bin = bin_of_rank(selection.coarse, coarse_bins, rank - beyond, scratch);
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

// Each warp takes tiles of its own and waits for no other warp. It starts the loads of its next round before it stores what the
// present round leaves.
template <class Source>
TOPKUBE_KERNEL(filter_threads) filter(Source source, Selection selection) {
  auto& shared = gpu::shared<FilterShared>();
  State& state = *selection.state;
  for (u32 i = gpu::thread(); i < coarse_bins; i += gpu::threads()) shared.bins[i] = 0;
  gpu::sync();
  const bool selects = selection.mode != from_data;
  const u32 least = selects ? state.least : Source::mask + 1, most = state.most;
  u16* positions = shared.positions[gpu::warp()];
  // The tiles of a block are spread over the array, so that few tiles occupy all multiprocessors.
  const u64 stride = u64{gpu::blocks()} * (gpu::threads() / 32);
  u64 tile = u64{gpu::warp()} * gpu::blocks() + gpu::block();
  Round<Source> round(source, selection, tile * filter_tile);
  for (; tile < selection.tiles; tile += stride) {
    u32 count = 0;
    for (u32 first = 0; first < filter_tile; first += round.items) {
      const u32 taken = round.finish(source, least);
      const u64 next = first + round.items < filter_tile ? round.base + round.items : (tile + stride) * filter_tile;
      round = Round<Source>(source, selection, next);
      if (gpu::ballot(taken != 0)) count = append_positions<Source>(taken, first, positions, count);
    }
    if (selects) append_segment(source, selection, tile, positions, count, least, most, shared.bins);
  }
  if (!selects) return;
  gpu::sync();
  for (u32 i = gpu::thread(); i < coarse_bins; i += gpu::threads()) {
    if (shared.bins[i]) gpu::add(selection.coarse + i, shared.bins[i]);
  }
  if (is_last_block(&state.filter_done, shared.scratch)) choose_bin(selection, gpu::observe(&state.candidates), shared.scratch);
}

}  // namespace topkube
