// Histograms: how lanes count, and the search for the bin that holds the element of a rank.
#pragma once

#include "../block_reduce.hpp"

namespace topkube {

struct Bin {
  u32 number;
  u64 rank;  // within the bin
};

// Adds 1 to the bin `bin` of each lane that is `counted`. All lanes of the warp call it. The lanes that share the bin of the first
// of them add to it together, because additions to one address run one after another.
TOPKUBE_DEVICE void add_to_bin(u32* bins, u32 bin, bool counted) {
  const u32 votes = gpu::ballot(counted);
  if (votes == 0) return;
  const u32 first = gpu::first_bit(votes), first_bin = gpu::shuffle(bin, first), peers = gpu::ballot(counted && bin == first_bin);
  if (gpu::lane() == first) {
    gpu::add(bins + bin, gpu::popcount(peers));
  } else if (counted && (peers >> gpu::lane() & 1u) == 0) {
    gpu::add(bins + bin, 1u);
  }
}

// Returns the bin that holds the element of this rank, counted from the highest bin down. The bins hold at least that many
// elements.
TOPKUBE_DEVICE Bin bin_of_rank(const u32* bins, u32 size, u64 rank, BlockScratch& scratch) {
  const u32 threads = gpu::threads(), each = (size + threads - 1) / threads;
  // Thread 0 has the highest bins.
  const u32 mine = gpu::thread() * each, end = mine < size ? size - mine : 0, begin = end > each ? end - each : 0;
  u64 sum = 0;
  for (u32 i = begin; i < end; ++i) sum += gpu::observe(bins + i);
  const u64 up_to_lane = sum_up_to_lane(sum);
  u64 total;
  const u64 before = up_to_lane - sum + sum_before_warp(gpu::shuffle(up_to_lane, 31u), scratch, &total);
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

}  // namespace topkube
