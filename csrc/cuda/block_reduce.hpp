// Sums and prefix sums over the threads of a block, and the check for the last block of a grid.
#pragma once

#include "device.hpp"

namespace topkube {

template <class T>
TOPKUBE_DEVICE T warp_sum(T value) {
  for (u32 mask = 16; mask; mask /= 2) value += gpu::shuffle_xor(value, mask);
  return value;
}

// Returns the sum over this lane and the lanes before it.
template <class T>
TOPKUBE_DEVICE T sum_up_to_lane(T value) {
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const T below = gpu::shuffle(value, (gpu::lane() - step) & 31u);
    if (gpu::lane() >= step) value += below;
  }
  return value;
}

// Shared memory of the functions below: a word per warp, and what one thread computes for all threads of the block.
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
TOPKUBE_DEVICE u64 sum_before_warp(u64 value, BlockScratch& scratch, u64* total) {
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

}  // namespace topkube
