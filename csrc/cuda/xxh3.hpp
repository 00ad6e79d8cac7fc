// XXH3-64 of a wire buffer on the GPU, for the checksum of csrc/cpu/wire/wire.hpp: bytes 0..15 and 24..end, seed 0, default secret.
//
// The algorithm is Yann Collet's (xxHash specification, "XXH3"; the secret is his, BSD-2-Clause). Its long form adds up blocks of
// 1,024 bytes and scrambles the sums after each block. The sum of a block does not depend on earlier blocks, so a grid computes the
// sums in parallel. Only the scrambles, one multiplication per block, remain for one warp.
#pragma once

#include "block_reduce.hpp"

namespace topkube {

// The secret as words of 8 bytes, little-endian.
#if defined(TOPKUBE_EMULATE_CUDA)
static const u64 xxh3_secret[24]
#else
__constant__ const u64 xxh3_secret[24]
#endif
    = {0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu,
       0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u,
       0x4ef90da297486471u, 0xd8acdea946ef1938u, 0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au,
       0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
       0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

constexpr u64 xxh_prime32_1 = 0x9e3779b1u, xxh_prime32_2 = 0x85ebca77u, xxh_prime32_3 = 0xc2b2ae3du;
constexpr u64 xxh_prime64_1 = 0x9e3779b185ebca87u, xxh_prime64_2 = 0xc2b2ae3d27d4eb4fu, xxh_prime64_3 = 0x165667b19e3779f9u;
constexpr u64 xxh_prime64_4 = 0x85ebca77c2b2ae63u, xxh_prime64_5 = 0x27d4eb2f165667c5u;
constexpr u32 hash_threads = 256, hash_lanes = 8;
constexpr u64 hash_block = 1024;

// The hashed bytes of a buffer: everything except the 8 bytes of the checksum.
struct Hashed {
  const std::uint8_t* buffer;
  u64 size;
  // Returns 8 hashed bytes from position `at`.
  TOPKUBE_DEVICE_MEMBER u64 word(u64 at) const {
    if (at % 8 == 0) return *reinterpret_cast<const u64*>(buffer + (at < 16 ? at : at + 8));
    u64 value = 0;
    for (u32 i = 0; i < 8; ++i) {
      const u64 byte = at + i;
      value |= u64{buffer[byte < 16 ? byte : byte + 8]} << (8 * i);
    }
    return value;
  }
};

TOPKUBE_DEVICE u64 secret_word(u32 at) {
  const u32 word = at / 8, shift = at % 8 * 8;
  return shift ? xxh3_secret[word] >> shift | xxh3_secret[word + 1] << (64 - shift) : xxh3_secret[word];
}

TOPKUBE_DEVICE u64 folded_product(u64 a, u64 b) { return (a * b) ^ gpu::high_product(a, b); }
TOPKUBE_DEVICE u64 keyed_product(u64 key) { return (key & 0xffffffffu) * (key >> 32); }

TOPKUBE_DEVICE u64 avalanche(u64 hash) {
  hash ^= hash >> 37;
  hash *= 0x165667919e3779f9u;
  return hash ^ hash >> 32;
}

TOPKUBE_DEVICE u64 mixed_16(const Hashed& data, u64 at, u32 secret) {
  return folded_product(data.word(at) ^ secret_word(secret), data.word(at + 8) ^ secret_word(secret + 8));
}

// Hashes up to 240 bytes, with one thread. A wire buffer has at least 16 hashed bytes. The three forms and the numbers in them are
// those of the specification.
TOPKUBE_DEVICE u64 hash_short(const Hashed& data) {
  const u64 size = data.size;
  if (size <= 16) {
    const u64 low = data.word(0) ^ secret_word(24) ^ secret_word(32),
              high = data.word(size - 8) ^ secret_word(40) ^ secret_word(48);
    u64 swapped = 0;
    for (u32 i = 0; i < 8; ++i) swapped |= (low >> (8 * i) & 0xff) << (56 - 8 * i);
    return avalanche(size + swapped + high + folded_product(low, high));
  }
  u64 sum = size * xxh_prime64_1;
  if (size <= 128) {
    for (u32 i = 0; i < (static_cast<u32>(size) - 1) / 32 + 1; ++i) {
      sum += mixed_16(data, 16 * i, 32 * i) + mixed_16(data, size - 16 * (i + 1), 32 * i + 16);
    }
    return avalanche(sum);
  }
  for (u32 i = 0; i < 8; ++i) sum += mixed_16(data, 16 * i, 16 * i);
  sum = avalanche(sum);
  for (u32 i = 8; i < size / 16; ++i) sum += mixed_16(data, 16 * i, 16 * (i - 8) + 3);
  return avalanche(sum + mixed_16(data, size - 16, 136 - 17));
}

// Returns how many whole blocks an input has whose sums are scrambled. Short inputs have no blocks.
static constexpr u64 hash_blocks_of(u64 size) { return size > 240 ? (size - 1) / hash_block : 0; }

// Returns the words of workspace for the sums of one input.
static constexpr u64 hash_sums_of(u64 size) { return hash_blocks_of(size) * hash_lanes + 1; }

// Computes sums[8 * block + lane] for every whole block of a long input. There are `inputs` inputs of this size, `input_stride`
// bytes apart; the sums of input i begin at sums[i * hash_sums_of(size)]. The number of blocks of the grid is a multiple of
// `inputs`.
TOPKUBE_KERNEL(hash_threads) hash_sums(Hashed data, u64 inputs, u64 input_stride, u64* sums) {
  const u64 input = gpu::block() % inputs, worker = gpu::block() / inputs, workers = gpu::blocks() / inputs;
  data.buffer += input * input_stride;
  sums += input * hash_sums_of(data.size);
  const u64 count = hash_blocks_of(data.size) * hash_lanes, stride = workers * gpu::threads();
  for (u64 i = worker * gpu::threads() + gpu::thread(); i < count; i += stride) {
    const u32 lane = static_cast<u32>(i % hash_lanes);
    const u64 start = i / hash_lanes * hash_block;
    u64 sum = 0;
#pragma unroll 4
    for (u32 stripe = 0; stripe < 16; ++stripe) {
      const u64 at = start + 64 * stripe;
      sum += keyed_product(data.word(at + 8 * lane) ^ secret_word(8 * stripe + 8 * lane)) + data.word(at + 8 * (lane ^ 1u));
    }
    sums[i] = sum;
  }
}

// Returns the hash on lane 0. Runs as one warp. The places in the secret are those of the specification.
TOPKUBE_DEVICE u64 hash_end(const Hashed& data, const u64* sums) {
  const u32 lane = gpu::lane() % hash_lanes;
  if (data.size <= 240) return gpu::lane() == 0 ? hash_short(data) : 0;
  const u64 start[8] = {xxh_prime32_3, xxh_prime64_1, xxh_prime64_2, xxh_prime64_3,
                        xxh_prime64_4, xxh_prime32_2, xxh_prime64_5, xxh_prime32_1};
  u64 sum = start[0];
#pragma unroll
  for (u32 i = 1; i < 8; ++i) sum = lane == i ? start[i] : sum;
  const u64 blocks = hash_blocks_of(data.size), scramble = secret_word(128 + 8 * lane);
  // The next sums are under way while the warp scrambles these: a load takes as long as many scrambles.
  constexpr u32 ahead = 16;
  u64 next[ahead];
#pragma unroll
  for (u32 j = 0; j < ahead; ++j) next[j] = j < blocks ? sums[j * hash_lanes + lane] : 0;
  for (u64 first = 0; first < blocks; first += ahead) {
    u64 now[ahead];
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) now[j] = next[j];
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) {
      const u64 block = first + ahead + j;
      next[j] = block < blocks ? sums[block * hash_lanes + lane] : 0;
    }
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) {
      if (first + j >= blocks) break;
      sum += now[j];
      sum = (sum ^ sum >> 47 ^ scramble) * xxh_prime32_1;
    }
  }
  const auto accumulate = [&](u64 at, u32 secret) {
    sum += keyed_product(data.word(at + 8 * lane) ^ secret_word(secret + 8 * lane)) + data.word(at + 8 * (lane ^ 1u));
  };
  const u64 rest = blocks * hash_block;
  for (u32 stripe = 0; stripe < (data.size - 1 - rest) / 64; ++stripe) accumulate(rest + 64 * stripe, 8 * stripe);
  accumulate(data.size - 64, 192 - 64 - 7);
  u64 hash = data.size * xxh_prime64_1;
  for (u32 pair = 0; pair < 4; ++pair) {
    const u64 a = gpu::shuffle(sum, 2 * pair), b = gpu::shuffle(sum, 2 * pair + 1);
    hash += folded_product(a ^ secret_word(11 + 16 * pair), b ^ secret_word(11 + 16 * pair + 8));
  }
  return avalanche(hash);
}

}  // namespace topkube
