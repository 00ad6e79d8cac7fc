// `collect`: writes the selected entries in their order.
#pragma once

#include "narrow.hpp"

namespace topkube {

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
