// `collect`: writes the selected entries in their order.
#pragma once

#include "narrow.hpp"

namespace topkube {

struct CollectShared {
  BlockScratch scratch;
  u64 offsets[2];
};

// Publishes how many entries above (the lower half of `own`) and between (the upper half) a tile has. Writes to `shared.offsets`
// how many the tiles before it have. Every thread of the block calls this function, and can then read the offsets.
TOPKUBE_DEVICE void look_back_twice(const Selection& selection, u32 tile, u64 own, CollectShared& shared) {
  if (gpu::warp() == 0) {
    const u64 aboves = look_back(selection.collected[0], tile, own & 0xffffffffu);
    const u64 betweens = look_back(selection.collected[1], tile, own >> 32);
    if (gpu::lane() == 0) {
      shared.offsets[0] = aboves;
      shared.offsets[1] = betweens;
    }
  }
  gpu::sync();
}

// The rule by which entries are written, and where to: every entry >= upper ("above"), and of the other entries >= lower
// ("between") those with numbers in [first, first + between_count). A warp passes its entries in order, 32 at a time. `aboves` and
// `betweens` count the entries above and between that come before them.
struct Writer {
  u32 upper, lower;
  u64 first, between_count, aboves, betweens;
  template <class Write>
  TOPKUBE_DEVICE_MEMBER void pass(bool inside, u32 magnitude, const Write& write) {
    const u32 below = (u32{1} << gpu::lane()) - 1;
    const bool above = inside && magnitude >= upper, between = inside && !above && magnitude >= lower;
    const u32 above_votes = gpu::ballot(above), between_votes = gpu::ballot(between);
    const u64 number = betweens + gpu::popcount(between_votes & below);  // the number of entries between that come before
    if (above || (between && number >= first && number - first < between_count)) {
      const u64 taken = number <= first ? 0 : number - first < between_count ? number - first : between_count;
      write(aboves + gpu::popcount(above_votes & below) + taken);
    }
    aboves += gpu::popcount(above_votes);
    betweens += gpu::popcount(between_votes);
  }
};

// Does the work of `collect_entries` on candidates in segments. A block takes `selection.group` segments at a time, and each of its
// warps takes consecutive segments of them.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_segments(const Selection& selection, u32* indices, Value* values, float* acc, CollectShared& shared) {
  State& state = *selection.state;
  const u32 upper = state.upper, lower = state.lower, lane = gpu::lane();
  const u32 warps = gpu::threads() / 32, each = (selection.group + warps - 1) / warps;
  const u64 first_between = state.first_between, between_count = state.between_count;
  for (;;) {
    const u32 group = take_tile(&state.collect_ticket, shared.scratch);
    if (u64{group} * selection.group >= selection.tiles) return;
    const u64 begin = u64{group} * selection.group,
              limit = begin + selection.group < selection.tiles ? begin + selection.group : selection.tiles;
    const u64 first = begin + gpu::warp() * each, end = first + each < limit ? first + each : limit;
    u64 mine = 0;  // the entries above in the lower half, the entries between in the upper half
    for (u64 tile = first; tile < end; ++tile) {
      const u64 start = selection.filtered[tile] >> 16, size = selection.filtered[tile] & 0xffffu;
#pragma unroll 4
      for (u64 i = lane; i < size; i += 32) {
        const u32 magnitude = selection.values[start + i] & Source::mask;
        mine += magnitude >= upper ? u64{1} : magnitude >= lower ? u64{1} << 32 : u64{0};
      }
    }
    u64 total;
    const u64 before = sum_before_warp(warp_sum(mine), shared.scratch, &total);
    look_back_twice(selection, group, total, shared);
    Writer writer{
        upper, lower, first_between, between_count, shared.offsets[0] + (before & 0xffffffffu), shared.offsets[1] + (before >> 32)};
    for (u64 tile = first; tile < end; ++tile) {
      const u64 start = selection.filtered[tile] >> 16, size = selection.filtered[tile] & 0xffffu;
      for (u64 i = lane; i - lane < size; i += 32) {
        const u32 value = i < size ? selection.values[start + i] : 0;
        writer.pass(i < size, value & Source::mask, [&](u64 at) {
          const u32 index = selection.indices[start + i];
          indices[at] = index;
          values[at] = static_cast<Value>(value);
          if (acc) acc[index] = 0.0f;
        });
      }
    }
  }
}

// Writes the selected entries (`Writer`) in order. If `acc` is not null, these entries become zero in it.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_entries(const Source& source, const Selection& selection, u32* indices, Value* values, float* acc,
                                    CollectShared& shared) {
  State& state = *selection.state;
  const bool reads_data = state.mode == from_data;
  if (segments && !reads_data) {
    collect_segments<Source>(selection, indices, values, acc, shared);
    return;
  }
  const u64 length = reads_data ? selection.length : state.candidates;
  const u32 upper = state.upper, lower = state.lower, lane = gpu::lane();
  const u64 first = state.first_between, between_count = state.between_count;
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
      value[j] = i >= length ? 0 : reads_data ? source.peek(i) : selection.values[i];
    }
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u32 magnitude = value[j] & Source::mask;
      const bool inside = base + 32 * j < length, above = inside && magnitude >= upper;
      mine += gpu::popcount(gpu::ballot(above));
      mine += u64{gpu::popcount(gpu::ballot(inside && !above && magnitude >= lower))} << 32;
    }
    u64 total;
    const u64 before = sum_before_warp(mine, shared.scratch, &total);
    look_back_twice(selection, tile, total, shared);
    Writer writer{
        upper, lower, first, between_count, shared.offsets[0] + (before & 0xffffffffu), shared.offsets[1] + (before >> 32)};
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u64 i = base + 32 * j;
      writer.pass(i < length, value[j] & Source::mask, [&](u64 at) {
        const u32 index = reads_data ? static_cast<u32>(i) : selection.indices[i];
        indices[at] = index;
        values[at] = static_cast<Value>(value[j]);
        if (acc) acc[index] = 0.0f;
      });
    }
  }
}

template <class Source, class Value>
TOPKUBE_KERNEL(collect_threads) collect(Source source, Selection selection, u32* indices, Value* values, float* acc) {
  collect_entries(source, selection, indices, values, acc, gpu::shared<CollectShared>());
}

}  // namespace topkube
