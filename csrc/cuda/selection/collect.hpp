// `collect`: writes the selected entries in their order.
#pragma once

#include "look_back.hpp"
#include "narrow.hpp"

namespace topkube {

struct CollectShared {
  BlockScratch scratch;
  u64 offsets[2];
  u64 starts[collect_threads];  // of the segments of a group: where the candidates are
  u32 before[collect_threads];  // how many candidates the segments of the group before this segment have
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

// The candidates of a group of consecutive segments, in the order of their indices.
struct Group {
  u32 segments, candidates;
  const u64* starts;
  const u32* before;

  // Returns where candidate i is, by a search for its segment.
  TOPKUBE_DEVICE_MEMBER u64 locate(u32 i) const {
    u32 low = 0, high = segments;  // low: the last segment that is known to start at i or before
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (before[middle] <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return starts[low] + (i - before[low]);
  }
};

// Reads the table of segments, one segment per thread. All threads of the block call it.
TOPKUBE_DEVICE Group load_group(const Selection& selection, u64 first, CollectShared& shared) {
  const u64 left = selection.tiles - first;
  const u32 segments = left < selection.group ? static_cast<u32>(left) : selection.group, thread = gpu::thread();
  const u64 segment = thread < segments ? selection.segments[first + thread] : 0;
  const u32 size = static_cast<u32>(segment & 0xffffu), up_to_lane = sum_up_to_lane(size);
  u64 total;
  const u64 before_warp = sum_before_warp(gpu::shuffle(up_to_lane, 31u), shared.scratch, &total);
  if (thread < segments) {
    shared.starts[thread] = segment >> 16;
    shared.before[thread] = static_cast<u32>(before_warp) + up_to_lane - size;
  }
  gpu::sync();
  return {segments, static_cast<u32>(total), shared.starts, shared.before};
}

// Calls use(place, magnitude bits, inside) for the candidates `begin` to `end` of a group, 32 at a time. `place` is where the
// candidate is. A lane starts several loads before it uses the first value.
template <class Use>
TOPKUBE_DEVICE void for_each_candidate(const Selection& selection, const Group& group, u32 begin, u32 end, const Use& use) {
  constexpr u32 ahead = 4;
  for (u32 first = begin; first < end; first += 32 * ahead) {
    u64 place[ahead];
    u32 value[ahead];
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) {
      const u32 i = first + 32 * j + gpu::lane();
      place[j] = i < end ? group.locate(i) : 0;
      value[j] = i < end ? selection.values[place[j]] : 0;
    }
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) use(place[j], value[j], first + 32 * j + gpu::lane() < end);
  }
}

// Does the work of `collect_entries` on candidates. A block takes a group of segments at a time, and each of its warps takes a part
// of the group's candidates.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_candidates(const Selection& selection, u32* indices, Value* values, float* acc, CollectShared& shared) {
  State& state = *selection.state;
  const u32 upper = state.upper, lower = state.lower, warps = gpu::threads() / 32;
  const u64 first_between = state.first_between, between_count = state.between_count;
  for (;;) {
    const u32 number = take_tile(&state.collect_ticket, shared.scratch);
    const u64 first_segment = u64{number} * selection.group;
    if (first_segment >= selection.tiles) return;
    const Group group = load_group(selection, first_segment, shared);
    const u32 part = (group.candidates + warps - 1) / warps, wanted = gpu::warp() * part;
    const u32 begin = wanted < group.candidates ? wanted : group.candidates,
              end = group.candidates - begin < part ? group.candidates : begin + part;
    u64 mine = 0;  // the entries above in the lower half, the entries between in the upper half
    for_each_candidate(selection, group, begin, end, [&](u64, u32 value, bool inside) {
      const u32 magnitude = value & Source::mask;
      mine += !inside ? u64{0} : magnitude >= upper ? u64{1} : magnitude >= lower ? u64{1} << 32 : u64{0};
    });
    u64 total;
    const u64 before = sum_before_warp(warp_sum(mine), shared.scratch, &total);
    look_back_twice(selection, number, total, shared);
    Writer writer{
        upper, lower, first_between, between_count, shared.offsets[0] + (before & 0xffffffffu), shared.offsets[1] + (before >> 32)};
    for_each_candidate(selection, group, begin, end, [&](u64 place, u32 value, bool inside) {
      writer.pass(inside, value & Source::mask, [&](u64 at) {
        const u32 index = selection.indices[place];
        indices[at] = index;
        values[at] = static_cast<Value>(value);
        if (acc) acc[index] = 0.0f;
      });
    });
  }
}

// Writes the selected entries (`Writer`) in order. If `acc` is not null, these entries become zero in it.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_entries(const Source& source, const Selection& selection, u32* indices, Value* values, float* acc,
                                    CollectShared& shared) {
  State& state = *selection.state;
  if (state.mode == from_candidates) {
    collect_candidates<Source>(selection, indices, values, acc, shared);
    return;
  }
  const u64 length = selection.length;
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
      value[j] = i < length ? source.peek(i) : 0;
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
        const u32 index = static_cast<u32>(i);
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
