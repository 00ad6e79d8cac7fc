// `collect`: writes the selected entries in their order.
#pragma once

#include "narrow.hpp"

namespace topkube {

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

// Does the work of `collect_entries` on candidates in segments. A block takes `s.group` segments at a time, and each of its warps
// takes consecutive segments of them.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_segments(const Selection& s, u32* indices, Value* values, float* acc, CollectShared& shared) {
  State& state = *s.state;
  const u32 upper = state.upper, lower = state.lower, lane = gpu::lane();
  const u32 warps = gpu::threads() / 32, each = (s.group + warps - 1) / warps;
  const u64 wanted_first = state.first, wanted = state.wanted;
  for (;;) {
    const u32 group = take_tile(&state.collect_ticket, shared.scratch);
    if (u64{group} * s.group >= s.tiles) return;
    const u64 begin = u64{group} * s.group, limit = begin + s.group < s.tiles ? begin + s.group : s.tiles;
    const u64 first = begin + gpu::warp() * each, end = first + each < limit ? first + each : limit;
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
TOPKUBE_DEVICE void collect_entries(const Source& source, const Selection& s, u32* indices, Value* values, float* acc,
                                    CollectShared& shared) {
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
    const u64 start = u64{tile} * (gpu::threads() * collect_steps);
    if (start >= length) return;
    const u64 base = start + gpu::warp() * (32 * collect_steps) + lane;
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

template <class Source, class Value>
TOPKUBE_KERNEL(collect_threads) collect(Source source, Selection s, u32* indices, Value* values, float* acc) {
  collect_entries(source, s, indices, values, acc, gpu::shared<CollectShared>());
}

}  // namespace topkube
