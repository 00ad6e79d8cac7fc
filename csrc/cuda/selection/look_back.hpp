// Prefix sums over the tiles of a grid in one pass, by decoupled look-back.
#pragma once

#include "../block_reduce.hpp"

namespace topkube {

// Decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016): a tile publishes
// its own sum, adds the sums that the tiles before it published, and publishes the prefix. A word carries its state in its top
// two bits, so it needs no fence. Tiles start in ascending order (`take_tile`), so all tiles before this tile have begun and will
// publish.
constexpr u64 own_sum = u64{1} << 62, prefix_sum = u64{2} << 62, sum_mask = own_sum - 1;
constexpr u32 look_back_ahead = 2;

// Returns the sum over all tiles before `tile`, on all lanes. One warp calls it.
TOPKUBE_DEVICE u64 look_back(u64* words, u32 tile, u64 own) {
  const u32 lane = gpu::lane();
  if (lane == 0) gpu::publish(words + tile, (tile == 0 ? prefix_sum : own_sum) | own);
  u64 before = 0;
  bool found = false;
  for (std::int64_t nearest = std::int64_t{tile} - 1; nearest >= 0 && !found; nearest -= 32 * look_back_ahead) {
    u64 word[look_back_ahead];  // loads of 64 tiles are under way at the same time
#pragma unroll
    for (u32 j = 0; j < look_back_ahead; ++j) {
      const std::int64_t at = nearest - 32 * j - lane;
      word[j] = at < 0 ? prefix_sum : gpu::observe(words + at);
    }
#pragma unroll
    for (u32 j = 0; j < look_back_ahead; ++j) {
      if (found) break;
      const std::int64_t at = nearest - 32 * j - lane;
      while (gpu::ballot(word[j] >> 62 == 0)) {
        gpu::pause();
        if (at >= 0) word[j] = gpu::observe(words + at);
      }
      const u32 prefixes = gpu::ballot(word[j] >> 62 == 2);
      const u32 farthest = prefixes ? gpu::first_bit(prefixes) : 31u;
      before += warp_sum(lane <= farthest ? word[j] & sum_mask : u64{0});
      found = prefixes != 0;
    }
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
