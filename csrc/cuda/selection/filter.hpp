// `filter`: reads the data once, and appends the entries that reach the lower bound.
#pragma once

#include "histogram_rank.hpp"
#include "look_back.hpp"
#include "prepare.hpp"

namespace topkube {

// Returns how far numbers with so many bits are shifted right so that at most 2^12 bins are left.
TOPKUBE_DEVICE u32 bin_shift(u32 bits) { return bits > coarse_bits ? bits - coarse_bits : 0; }

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

// Reads this lane's items from element `base` on, and writes the sums of a source that writes. Of the items of the warp, the first
// `available` exist; the others are 0. If `whole`, all exist, and all arrays are aligned to 16 bytes.
template <class Source>
TOPKUBE_DEVICE void read_items(const Source& source, u64 base, u32 available, bool whole, u32 (&value)[Source::steps]) {
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
    if (item_position<Source>(j) < available) source.load(base + item_position<Source>(j), raw[j / Source::pack], j % Source::pack);
  }
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    value[j] = item_position<Source>(j) < available ? source.finish(raw[j / Source::pack], j % Source::pack) : 0;
    if (item_position<Source>(j) < available) source.store(base + item_position<Source>(j), value[j]);
  }
}

// Where the taken items of a warp go: in the order of their positions. Each lane counts its items of each chunk. One prefix sum
// over the warp adds these counts for all chunks at once, in the four 16-bit parts of a word. A count is at most 256.
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
    const u64 sums = sum_up_to_lane(counts);
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

template <class Source>
TOPKUBE_KERNEL(filter_threads) filter(Source source, Selection selection) {
  constexpr u32 warp_items = 32 * Source::steps, tile_items = warp_items * (filter_threads / 32);
  auto& shared = gpu::shared<FilterShared>();
  State& state = *selection.state;
  const u32 tile = segments ? gpu::block() : take_tile(&state.filter_ticket, shared.scratch), lane = gpu::lane();
  const u64 base = u64{tile} * tile_items + u64{gpu::warp()} * warp_items;
  const u32 available = base >= selection.length               ? 0
                        : selection.length - base < warp_items ? static_cast<u32>(selection.length - base)
                                                               : warp_items;

  u32 value[Source::steps];
  read_items(source, base, available, selection.aligned && available == warp_items, value);
  if (selection.mode == from_data) return;

  const u32 least = state.least, most = state.most, shift = bin_shift(bit_width(most - least));
  u32 taken = 0;
#pragma unroll
  for (u32 j = 0; j < Source::steps; ++j) {
    taken |= (item_position<Source>(j) < available && (value[j] & Source::mask) >= least ? 1u : 0u) << j;
  }
  const Places<Source> places(taken);
  u64 total;
  const u64 before = sum_before_warp(places.all, shared.scratch, &total);
  if constexpr (segments) {
    static_assert(tile_items < 0x10000);
    if (gpu::thread() == 0) {
      shared.offset = gpu::add(&state.candidates, total);
      selection.filtered[tile] = shared.offset << 16 | total;
    }
  } else if (gpu::warp() == 0) {
    const u64 offset = look_back(selection.filtered, tile, total);
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
        binned = at < selection.capacity && magnitude <= most;
        if (at < selection.capacity) {
          selection.indices[at] = static_cast<u32>(base + item_position<Source>(j));
          selection.values[at] = value[j];
        }
        if (binned && !crowded) gpu::add(selection.coarse + bin, 1u);
      }
      if (crowded) {
        const u32 peers = gpu::matching(binned ? bin : 0x80000000u | lane);
        if (binned && gpu::first_bit(peers) == lane) gpu::add(selection.coarse + bin, gpu::popcount(peers));
      }
    }
  }

  if (segments || !is_last_block(&state.filter_done, shared.scratch)) return;
  choose_bin(selection, gpu::observe(selection.filtered + gpu::blocks() - 1) & sum_mask, shared.scratch);
}

// Runs as one block, after `filter` with segments.
TOPKUBE_KERNEL(narrow_threads) place_rank(Selection selection) {
  auto& shared = gpu::shared<FilterShared>();
  choose_bin(selection, selection.state->candidates, shared.scratch);
}

}  // namespace topkube
