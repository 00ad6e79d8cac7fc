// `collect`: writes the selected entries in their order.
#pragma once

#include "look_back.hpp"
#include "narrow.hpp"

namespace topkube {

struct CollectShared {
  BlockScratch scratch;
  u64 offsets[2];
  u32 starts[collect_threads];  // of the segments of a group: where the candidates are
  u32 before[collect_threads];  // how many candidates the segments of the group before this segment have
};

// Publishes how many entries above (the lower half of `own`) and between (the upper half) a tile has. Writes to `shared.offsets`
// how many the tiles before it have. Every thread of the block calls this function, and can then read the offsets.
TOPKUBE_DEVICE void look_back_twice(const Selection& selection, u32 tile, u64 own, CollectShared& shared) {
  const u32 kind = gpu::warp();  // two warps look back at the same time
  if (kind < 2) {
    const u64 before =
        look_back(kind ? selection.collected[1] : selection.collected[0], tile, kind ? own >> 32 : own & 0xffffffffu);
    if (gpu::lane() == 0) shared.offsets[kind] = before;
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
  const u32* starts;
  const u32* before;

  // Returns where candidate i is, by a search for its segment.
  TOPKUBE_DEVICE_MEMBER u32 locate(u32 i) const {
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
    shared.starts[thread] = static_cast<u32>(segment >> 16);
    shared.before[thread] = static_cast<u32>(before_warp) + up_to_lane - size;
  }
  gpu::sync();
  return {segments, static_cast<u32>(total), shared.starts, shared.before};
}

// Some candidates of a group in registers: lane i of a warp has candidates i, 32 + i, 64 + i, ... of the warp's part, so the parts of
// the warps are in order.
struct HeldCandidates {
  u32 begin, end;  // the part of the warp
  u32 values[collect_steps], indices[collect_steps];

  // Loads the candidates from number `first` on, as many as the block has room for. All loads are under way at the same time.
  TOPKUBE_DEVICE_MEMBER void load(const Selection& selection, const Group& group, u32 first) {
    const u32 warps = gpu::threads() / 32, left = group.candidates - first, room = gpu::threads() * collect_steps;
    const u32 size = left < room ? left : room, part = (size + warps - 1) / warps, wanted = gpu::warp() * part;
    begin = first + (wanted < size ? wanted : size);
    end = first + size - begin < part ? first + size : begin + part;
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      values[j] = indices[j] = 0;
      if (begin + 32 * j >= end) continue;  // the same for all lanes
      if (!is_inside(j)) continue;
      const u32 place = group.locate(begin + 32 * j + gpu::lane());
      values[j] = selection.values[place];
      indices[j] = selection.indices[place];
    }
  }
  TOPKUBE_DEVICE_MEMBER bool is_inside(u32 j) const { return begin + 32 * j + gpu::lane() < end; }

  // Returns how many entries of the warp are above, in the lower half, and between, in the upper half.
  TOPKUBE_DEVICE_MEMBER u64 count(u32 mask, u32 upper, u32 lower) const {
    u32 above = 0, between = 0;
#pragma unroll
    for (u32 j = 0; j < collect_steps; ++j) {
      const u32 magnitude = values[j] & mask;
      if (is_inside(j)) above += magnitude >= upper, between += magnitude < upper && magnitude >= lower;
    }
    return u64{gpu::warp_total(between)} << 32 | gpu::warp_total(above);
  }
};

// Does the work of `collect_entries` on candidates. A block takes a group of segments at a time, and each of its warps takes a part
// of the group's candidates. If there are more than the block has room for, it loads them twice.
template <class Source, class Value>
TOPKUBE_DEVICE void collect_candidates(const Selection& selection, u32* indices, Value* values, float* acc, CollectShared& shared) {
  State& state = *selection.state;
  const u32 upper = state.upper, lower = state.lower, room = gpu::threads() * collect_steps;
  for (;;) {
    const u32 number = take_tile(&state.collect_ticket, shared.scratch);
    const u64 first_segment = u64{number} * selection.group;
    if (first_segment >= selection.tiles) return;
    const Group group = load_group(selection, first_segment, shared);
    HeldCandidates held;
    u64 mine = 0, total, before;
    for (u32 first = 0; first == 0 || first < group.candidates; first += room) {
      held.load(selection, group, first);
      mine += held.count(Source::mask, upper, lower);
    }
    before = sum_before_warp(mine, shared.scratch, &total);
    look_back_twice(selection, number, total, shared);
    const u64 first_between = state.first_between, between_count = state.between_count;
    u64 aboves = shared.offsets[0], betweens = shared.offsets[1];
    for (u32 first = 0; first < group.candidates; first += room) {
      if (group.candidates > room) {
        held.load(selection, group, first);
        before = sum_before_warp(held.count(Source::mask, upper, lower), shared.scratch, &total);
      }
      Writer writer{upper, lower, first_between, between_count, aboves + (before & 0xffffffffu), betweens + (before >> 32)};
#pragma unroll
      for (u32 j = 0; j < collect_steps; ++j) {
        if (held.begin + 32 * j >= held.end) continue;  // the same for all lanes
        writer.pass(held.is_inside(j), held.values[j] & Source::mask, [&](u64 at) {
          indices[at] = held.indices[j];
          values[at] = static_cast<Value>(held.values[j]);
          if (acc) acc[held.indices[j]] = 0.0f;
        });
      }
      if (group.candidates > room) {
        aboves += total & 0xffffffffu;
        betweens += total >> 32;
      }
    }
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
TOPKUBE_KERNEL(collect_threads, collect_blocks) collect(Source source, Selection selection, u32* indices, Value* values,
                                                        float* acc) {
  collect_entries(source, selection, indices, values, acc, gpu::shared<CollectShared>());
}

}  // namespace topkube
