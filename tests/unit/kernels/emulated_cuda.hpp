// The grid of a GPU on one host thread, for tests. Every GPU thread is a fiber, and a few blocks are alive at a time. A fiber that
// waits (sync, an operation of a warp, a spin) lets another fiber run, which is drawn at random (TOPKUBE_EMULATION_SEED is the
// seed). Atomics also let other fibers run now and then, so that the tests try many orders.
//
// The emulation shows neither weak memory ordering nor speed.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <ucontext.h>

#define TOPKUBE_KERNEL(...) static void
#define TOPKUBE_DEVICE static inline
#define TOPKUBE_DEVICE_MEMBER inline

namespace topkube::gpu {

class Emulator {
 public:
  static Emulator& self() {
    static Emulator emulator;
    return emulator;
  }

  struct Warp {
    u64 values[2][32];
    u32 arrived = 0, generation = 0;
  };
  struct Block {
    u32 number = 0, arrived = 0, generation = 0, running = 0;
    std::vector<Warp> warps;
    std::vector<std::uint64_t> shared;
  };
  struct Fiber {
    Block* block = nullptr;
    u32 thread = 0;
    bool started = false, done = true;
    jmp_buf at;
    ucontext_t first;
    std::unique_ptr<char[]> stack;
  };

  u32 blocks = 0, threads = 0;
  Fiber* now = nullptr;

  // If `is_cluster`, all blocks are alive at the same time.
  void run(u64 grid, u32 size, std::size_t shared_bytes, const std::function<void()>& body, bool is_cluster = false) {
    blocks = static_cast<u32>(grid);
    threads = size;
    body_ = &body;
    const u32 resident = static_cast<u32>(is_cluster ? grid : std::min<u64>(grid, 1 + random_() % 4));
    std::vector<Block> alive(resident);
    while (fibers_.size() < std::size_t{resident} * size) fibers_.push_back(std::make_unique<Fiber>());
    u32 next = 0, left = 0;
    const auto begin = [&](u32 place) {
      Block& block = alive[place];
      block = Block{};
      block.number = next++;
      block.running = size;
      block.warps.resize((size + 31) / 32);
      block.shared.assign(shared_bytes / 8 + 2, 0xdeadbeefdeadbeefu);  // memory that no thread has written is not zero
      for (u32 i = 0; i < size; ++i) {
        Fiber& fiber = *fibers_[std::size_t{place} * size + i];
        fiber.block = &block;
        fiber.thread = i;
        fiber.started = fiber.done = false;
      }
      ++left;
    };
    for (u32 place = 0; place < resident; ++place) begin(place);
    u64 idle = 0;
    while (left) {
      const u32 place = random_() % resident;  // one block at a time: its warps mostly wait for one another
      Block& block = alive[place];
      if (!block.running) continue;
      const u32 warps = static_cast<u32>(block.warps.size()), first = random_() % warps;
      for (u32 w = 0; w < warps; ++w) {
        const u32 warp = (first + w) % warps;
        for (u32 i = warp * 32; i < std::min(size, warp * 32 + 32); ++i) {
          Fiber& fiber = *fibers_[std::size_t{place} * size + i];
          if (!fiber.done) resume(fiber);
        }
      }
      if (!block.running) {
        --left;
        if (next < grid) begin(place);
      }
      if (++idle > 400'000'000) {
        std::fprintf(stderr, "a grid of %u blocks does not end\n", blocks);
        std::abort();
      }
    }
  }

  void give_way() {
    if (_setjmp(now->at) == 0) _longjmp(scheduler_, 1);
  }
  bool chance() { return (random_() & 63u) == 0; }

  // Passes the values of all threads of the warp to `read`, and returns its result.
  template <class Read>
  auto together(u64 value, const Read& read) {
    Fiber& me = *now;
    Warp& warp = me.block->warps[me.thread / 32];
    const u32 members = std::min(32u, threads - me.thread / 32 * 32), generation = warp.generation;
    u64* values = warp.values[generation & 1];
    values[me.thread % 32] = value;
    if (++warp.arrived == members) {
      warp.arrived = 0;
      ++warp.generation;
    }
    while (warp.generation == generation) give_way();
    return read(values, members);
  }

  void sync() {
    Block& block = *now->block;
    const u32 generation = block.generation;
    if (++block.arrived == threads) {
      block.arrived = 0;
      ++block.generation;
    }
    while (block.generation == generation) give_way();
  }

  void sync_cluster() {
    const u32 generation = cluster_generation_;
    if (++cluster_arrived_ == blocks * threads) {
      cluster_arrived_ = 0;
      ++cluster_generation_;
    }
    while (cluster_generation_ == generation) give_way();
  }

 private:
  static constexpr std::size_t stack_bytes = 32 * 1024;

  Emulator() {
    const char* seed = std::getenv("TOPKUBE_EMULATION_SEED");
    random_.seed(seed ? static_cast<u32>(std::atoi(seed)) : 1u);
  }

  void resume(Fiber& fiber) {
    now = &fiber;
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(stack_bytes);
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = stack_bytes;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, &Emulator::entry, 0);
    setcontext(&fiber.first);
  }

  static void entry() {
    Emulator& emulator = self();
    (*emulator.body_)();
    emulator.now->done = true;
    --emulator.now->block->running;
    _longjmp(emulator.scheduler_, 1);
  }

  std::mt19937 random_;
  u32 cluster_arrived_ = 0, cluster_generation_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  const std::function<void()>* body_ = nullptr;
  jmp_buf scheduler_;
};

inline u32 thread() { return Emulator::self().now->thread; }
inline u32 threads() { return Emulator::self().threads; }
inline u32 block() { return Emulator::self().now->block->number; }
inline u32 blocks() { return Emulator::self().blocks; }
inline u32 lane() { return thread() & 31u; }
inline u32 warp() { return thread() >> 5; }

inline void sync() { Emulator::self().sync(); }
inline void sync_cluster() { Emulator::self().sync_cluster(); }
inline u32 ballot(bool flag) {
  return Emulator::self().together(flag, [](const u64* values, u32 members) {
    u32 bits = 0;
    for (u32 i = 0; i < members; ++i) bits |= static_cast<u32>(values[i]) << i;
    return bits;
  });
}
template <class T>
T shuffle(T value, u32 from) {
  u64 word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = Emulator::self().together(word, [from](const u64* values, u32) { return values[from & 31u]; });
  std::memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
T shuffle_xor(T value, u32 mask) {
  return shuffle(value, lane() ^ mask);
}
inline u32 matching(u32 key) {
  return Emulator::self().together(key, [key](const u64* values, u32 members) {
    u32 bits = 0;
    for (u32 i = 0; i < members; ++i) bits |= u32{values[i] == key} << i;
    return bits;
  });
}

inline void sync_warp() { ballot(true); }
inline u32 warp_total(u32 value) {
  return Emulator::self().together(value, [](const u64* values, u32 members) {
    u32 sum = 0;
    for (u32 i = 0; i < members; ++i) sum += static_cast<u32>(values[i]);
    return sum;
  });
}
inline u32 warp_largest(u32 value) {
  return Emulator::self().together(
      value, [](const u64* values, u32 members) { return static_cast<u32>(*std::max_element(values, values + members)); });
}

inline u32 popcount(u32 bits) { return static_cast<u32>(__builtin_popcount(bits)); }
inline u32 first_bit(u32 bits) { return static_cast<u32>(__builtin_ctz(bits)); }
inline u32 permute(u32 a, u32 b, u32 places) {
  const u64 bytes = u64{b} << 32 | a;
  u32 result = 0;
  for (u32 j = 0; j < 4; ++j) result |= static_cast<u32>(bytes >> (8 * (places >> (4 * j) & 7u)) & 0xffu) << (8 * j);
  return result;
}
inline u64 high_product(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }

inline float result(float value) {  // a GPU has one NaN as the result of arithmetic
  const u32 nan = 0x7fffffffu;
  if (value != value) std::memcpy(&value, &nan, sizeof value);
  return value;
}
inline float plus(float a, float b) { return result(a + b); }
inline float minus(float a, float b) { return result(a - b); }
inline float times(float a, float b) { return result(a * b); }
inline float magnitude(float a) { return __builtin_fabsf(a); }
inline float divide(float a, float b) { return result(a / b); }

template <class T>
T add(T* to, T value) {
  if (Emulator::self().chance()) Emulator::self().give_way();
  const T before = *to;
  *to += value;
  return before;
}
inline u32 lower(u32* to, u32 value) {
  const u32 before = *to;
  if (value < before) *to = value;
  return before;
}
template <class T>
T observe(const T* from) {
  return *static_cast<const volatile T*>(from);
}
template <class T>
void publish(T* to, T value) {
  if (Emulator::self().chance()) Emulator::self().give_way();
  *static_cast<volatile T*>(to) = value;
}
inline void fence() {}
inline void pause() { Emulator::self().give_way(); }

template <class T>
T& shared() {
  return *reinterpret_cast<T*>(Emulator::self().now->block->shared.data());
}
struct Nothing {};

class Launcher {
 public:
  explicit Launcher(void*) {}

  template <class Shared = Nothing, class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), u64 blocks, u32 threads, Arguments... arguments) {
    if (!blocks) return;
    ++launches;
    Emulator::self().run(blocks, threads, sizeof(Shared), [&] { kernel(arguments...); });
  }
  bool can_launch_clusters() const { return true; }
  template <class Shared, class... Parameters, class... Arguments>
  void launch_cluster(void (*kernel)(Parameters...), u32 threads, Arguments... arguments) {  // a cluster of three blocks
    ++launches;
    Emulator::self().run(3, threads, sizeof(Shared), [&] { kernel(arguments...); }, true);
  }
  static inline u64 launches = 0;
  u64 blocks_for(u64 items, u64 items_per_block, u32) const {  // a GPU of six blocks, so that loops over a grid run more than once
    const u64 worth = (items + items_per_block - 1) / items_per_block;
    return worth < 1 ? 1 : worth < 6 ? worth : 6;
  }
  int error() const { return 0; }
};

}  // namespace topkube::gpu

// Returns how many kernels were launched so far.
extern "C" __attribute__((visibility("default"), used)) inline topkube::u64 topkube_emulated_launches() {
  return topkube::gpu::Launcher::launches;
}
