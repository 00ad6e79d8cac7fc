// Operations of all threads of a block: sums, the search for the bin with the k-th largest element, and prefix sums over tiles.
#pragma once

#include "device.hpp"

namespace topkube {

template <class T>
TOPKUBE_DEVICE T warp_sum(T value) {
  for (u32 mask = 16; mask; mask /= 2) value += gpu::shuffle_xor(value, mask);
  return value;
}

struct BlockScratch {
  u64 words[32];
  u64 answer[2];
};

// Returns the sum over the block, on all of its threads.
TOPKUBE_DEVICE u64 block_sum(u64 value, BlockScratch& scratch) {
  value = warp_sum(value);
  gpu::sync();
  if (gpu::lane() == 0) scratch.words[gpu::warp()] = value;
  gpu::sync();
  u64 sum = 0;
  for (u32 i = 0; i < gpu::threads() / 32; ++i) sum += scratch.words[i];
  return sum;
}

// Does the same for 32 bits, with the hardware's sum over a warp.
TOPKUBE_DEVICE u32 block_total(u32 value, BlockScratch& scratch) {
  value = gpu::warp_total(value);
  gpu::sync();
  if (gpu::lane() == 0) scratch.words[gpu::warp()] = value;
  gpu::sync();
  return gpu::warp_total(gpu::lane() < gpu::threads() / 32 ? static_cast<u32>(scratch.words[gpu::lane()]) : 0u);
}

// Returns the sum over the warps before this warp, and the sum over all warps. All threads of a warp pass the same value.
TOPKUBE_DEVICE u64 warps_before(u64 value, BlockScratch& scratch, u64* total) {
  gpu::sync();
  if (gpu::lane() == 0) scratch.words[gpu::warp()] = value;
  gpu::sync();
  u64 before = 0, sum = 0;
  for (u32 i = 0; i < gpu::threads() / 32; ++i) {
    if (i == gpu::warp()) before = sum;
    sum += scratch.words[i];
  }
  *total = sum;
  return before;
}

// Returns true if this block is the last block of its kernel that gets here. It can then observe what all other blocks wrote
// before.
TOPKUBE_DEVICE bool is_last_block(u32* done, BlockScratch& scratch) {
  gpu::fence();
  gpu::sync();
  if (gpu::thread() == 0) scratch.answer[0] = gpu::add(done, 1u) + 1 == gpu::blocks();
  gpu::sync();
  const bool last = scratch.answer[0] != 0;
  gpu::sync();
  if (last) gpu::fence();
  return last;
}

struct Bin {
  u32 number;
  u64 rank;  // within the bin
};

// Returns the bin that holds the element of this rank, counted from the highest bin down. The bins hold at least that many
// elements.
TOPKUBE_DEVICE Bin bin_of_rank(const u32* bins, u32 size, u64 rank, BlockScratch& scratch) {
  const u32 threads = gpu::threads(), each = (size + threads - 1) / threads;
  // Thread 0 has the highest bins.
  const u32 mine = gpu::thread() * each, end = mine < size ? size - mine : 0, begin = end > each ? end - each : 0;
  u64 sum = 0;
  for (u32 i = begin; i < end; ++i) sum += gpu::observe(bins + i);
  u64 before = sum;  // inclusive over the warp, then exclusive
  for (u32 step = 1; step < 32; step *= 2) {
    const u64 below = gpu::shuffle(before, (gpu::lane() - step) & 31u);
    if (gpu::lane() >= step) before += below;
  }
  u64 total;
  before = before - sum + warps_before(gpu::shuffle(before, 31u), scratch, &total);
  if (before < rank && rank <= before + sum) {
    rank -= before;
    u32 bin = end - 1;
    for (;; --bin) {
      const u32 count = gpu::observe(bins + bin);
      if (rank <= count) break;
      rank -= count;
    }
    scratch.answer[0] = bin;
    scratch.answer[1] = rank;
  }
  gpu::sync();
  const Bin bin{static_cast<u32>(scratch.answer[0]), scratch.answer[1]};
  gpu::sync();
  return bin;
}

// Decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016): a tile publishes
// its own sum, adds the sums that the tiles before it published, and publishes the prefix. A word carries its state in its top
// two bits, so it needs no fence. Tiles start in ascending order (`take_tile`), so all tiles before this tile have begun and will
// publish.
constexpr u64 own_sum = u64{1} << 62, prefix_sum = u64{2} << 62, sum_mask = own_sum - 1;

// Returns the sum over all tiles before `tile`, on all lanes. One warp calls it.
TOPKUBE_DEVICE u64 look_back(u64* words, u32 tile, u64 own) {
  const u32 lane = gpu::lane();
  if (lane == 0) gpu::publish(words + tile, (tile == 0 ? prefix_sum : own_sum) | own);
  u64 before = 0;
  for (std::int64_t nearest = std::int64_t{tile} - 1; nearest >= 0; nearest -= 32) {
    const std::int64_t at = nearest - lane;
    u64 word = at < 0 ? prefix_sum : gpu::observe(words + at);
    while (gpu::ballot(word >> 62 == 0)) {
      gpu::pause();
      if (at >= 0) word = gpu::observe(words + at);
    }
    const u32 prefixes = gpu::ballot(word >> 62 == 2);
    const u32 farthest = prefixes ? gpu::first_bit(prefixes) : 31u;
    before += warp_sum(lane <= farthest ? word & sum_mask : u64{0});
    if (prefixes) break;
  }
  if (lane == 0 && tile > 0) gpu::publish(words + tile, prefix_sum | (before + own));
  return before;
}

// Returns the next tile. Blocks get tiles in the order of their calls.
TOPKUBE_DEVICE u32 take_tile(u32* ticket, BlockScratch& scratch) {
  gpu::sync();
  if (gpu::thread() == 0) scratch.answer[0] = gpu::add(ticket, 1u);
  gpu::sync();
  return static_cast<u32>(scratch.answer[0]);
}

}  // namespace topkube
