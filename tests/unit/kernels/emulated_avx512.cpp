// Compares the AVX-512 path, emulated by SIMDe, with the portable one: all kernels of the table, all dtypes, random bits.
// Prints the first difference and exits with 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/dtype.hpp"
#include "cpu/paths/path_kernels.hpp"

namespace topkube {
extern const PathKernels portable_kernels;
extern const PathKernels avx512_kernels;
}  // namespace topkube

using namespace topkube;

namespace {

using Bytes = std::vector<std::uint8_t>;

struct Outcome {
  std::size_t count = 0;
  std::vector<std::uint32_t> indices, values;
  Bytes acc;
};

void same(bool equal, const char* what, int dtype, std::size_t length) {
  if (equal) return;
  std::printf("%s differs: dtype %d, %zu elements\n", what, dtype, length);
  std::exit(1);
}

bool equal(const Outcome& a, const Outcome& b) {
  return a.count == b.count && a.acc == b.acc && std::memcmp(a.indices.data(), b.indices.data(), 4 * a.count) == 0 &&
         std::memcmp(a.values.data(), b.values.data(), 4 * a.count) == 0;
}

template <class Run>
Outcome outcome(std::size_t length, const Run& run) {
  Outcome result;
  result.indices.resize(length + filter_slack);
  result.values.resize(length + filter_slack);
  result.count = run(result);
  return result;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const PathKernels& a = avx512_kernels;
  const PathKernels& b = portable_kernels;
  for (std::size_t length : {1, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 4096}) {
    for (int dtype = 0; dtype < 3; ++dtype) {
      const std::size_t item = item_size(static_cast<Dtype>(dtype));
      for (int round = 0; round < 40; ++round) {
        Bytes data(length * item);
        for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
        // Any bits in odd rounds, also a NaN in both addends: every path must compute the same NaN from them.
        const bool any = round % 2;
        std::vector<float> residual(length), values(length);
        for (std::size_t i = 0; i < length; ++i) residual[i] = static_cast<float>(random() % 2001) / 64 - 15;
        for (std::size_t i = round; any && i < length; i += 5)
          residual[i] = float_of(0xffc00000u | static_cast<std::uint32_t>(random()));
        if (!any) {
          for (std::size_t i = 0; i < length; ++i) values[i] = residual[(i * 7) % length] / 3;
          b.narrow[dtype](data.data(), values.data(), length, 1.0f);
        }
        const std::uint32_t thresholds[] = {0, 0x80000000u, 1, bits_of(2.5f), 0x7f800000u, 0x4000, random() >> 1, random() >> 17};
        for (const std::uint32_t threshold : thresholds) {
          const auto filter = [&](PathKernels::Filter kernel) {
            return outcome(
                length, [&](Outcome& o) { return kernel(data.data(), length, 77, threshold, o.indices.data(), o.values.data()); });
          };
          same(equal(filter(a.filter_bits[dtype]), filter(b.filter_bits[dtype])), "filter_bits", dtype, length);
          same(equal(filter(a.filter_float[dtype]), filter(b.filter_float[dtype])), "filter_float", dtype, length);
          const auto accumulate = [&](PathKernels::AccumulateFilter kernel) {
            return outcome(length, [&](Outcome& o) {
              o.acc.resize(4 * length);
              return kernel(data.data(), residual.data(), reinterpret_cast<float*>(o.acc.data()), length, 77, threshold,
                            o.indices.data(), o.values.data());
            });
          };
          same(equal(accumulate(a.accumulate_filter[dtype]), accumulate(b.accumulate_filter[dtype])), "accumulate_filter", dtype,
               length);
        }
        double sum_a, sum_b;
        std::uint32_t largest_a, largest_b;
        a.summarise_magnitudes[dtype](data.data(), length, &sum_a, &largest_a);
        b.summarise_magnitudes[dtype](data.data(), length, &sum_b, &largest_b);
        same(largest_a == largest_b && (sum_a == sum_b || (std::isnan(sum_a) && std::isnan(sum_b))), "summarise_magnitudes", dtype,
             length);
        std::vector<float> wide_a(length), wide_b(length);
        a.widen[dtype](wide_a.data(), data.data(), length);
        b.widen[dtype](wide_b.data(), data.data(), length);
        same(std::memcmp(wide_a.data(), wide_b.data(), 4 * length) == 0, "widen", dtype, length);
        Bytes narrow_a(length * item), narrow_b(length * item);
        a.narrow[dtype](narrow_a.data(), residual.data(), length, 0.37f);
        b.narrow[dtype](narrow_b.data(), residual.data(), length, 0.37f);
        same(narrow_a == narrow_b, "narrow", dtype, length);
        same(a.is_finite[dtype](data.data(), length) == b.is_finite[dtype](data.data(), length), "is_finite", dtype, length);
      }
    }
  }
  for (std::size_t length : {1, 63, 64, 65, 200, 1000, 4096}) {
    std::vector<float> data(length);
    for (float& value : data) value = static_cast<float>(random() % 2001) / 64 - 15;
    data[length / 2] = std::nanf("");
    const std::uint32_t ends[] = {0, 1, bits_of(2.5f), bits_of(14.0f), 0x7f800000u, 0x80000000u};
    for (const std::uint32_t lower : ends) {
      for (const std::uint32_t upper : ends) {
        if (lower > upper) continue;
        std::size_t above_a = 5, above_b = 5;
        const auto collect = [&](const PathKernels& path, std::size_t& above) {
          return outcome(
              length, [&](Outcome& o) { return path.collect_between(data.data(), length, lower, upper, o.values.data(), &above); });
        };
        const bool agree = equal(collect(a, above_a), collect(b, above_b)) && above_a == above_b;
        same(agree, "collect_between", 0, length);
      }
    }
  }
  for (std::size_t count = 1; count <= 256; ++count) {
    const unsigned low = static_cast<unsigned>(random() % 20);
    const std::size_t stride = (count + 7) / 8;
    std::vector<std::uint32_t> indices(count), read_a(count), read_b;
    for (std::size_t i = 0; i < count; ++i) {
      indices[i] = static_cast<std::uint32_t>(random());
      read_a[i] = indices[i] >> low << low;
    }
    read_b = read_a;
    Bytes planes_a(stride * low), planes_b(stride * low);
    a.write_planes(indices.data(), count, low, stride, planes_a.data());
    b.write_planes(indices.data(), count, low, stride, planes_b.data());
    same(planes_a == planes_b, "write_planes", static_cast<int>(low), count);
    a.read_planes(planes_a.data(), stride, low, count, read_a.data());
    b.read_planes(planes_a.data(), stride, low, count, read_b.data());
    same(read_a == indices && read_b == indices, "read_planes", static_cast<int>(low), count);

    // Ascending indices, whose bits begin in the middle of a word.
    for (std::uint32_t& index : indices) index %= static_cast<std::uint32_t>(20 * count) << low;
    std::sort(indices.begin(), indices.end());
    const std::size_t room = ((indices.empty() ? 0 : indices.back() >> low) + count) / 8 + 16;
    for (const std::size_t offset : {std::size_t{0}, std::size_t{37}, ~std::size_t{0} - 4}) {
      Bytes unary_a(room), unary_b(room);
      std::uint64_t word_a = 1, word_b = 1;
      const std::vector<std::uint32_t> later = [&] {
        std::vector<std::uint32_t> moved = indices;
        if (offset > 64)
          for (std::uint32_t& index : moved) index = std::max(index, std::uint32_t{5} << low);  // no bit before the word
        return moved;
      }();
      const std::size_t bytes_a = a.write_unary(later.data(), count, low, offset, &word_a, unary_a.data());
      const std::size_t bytes_b = b.write_unary(later.data(), count, low, offset, &word_b, unary_b.data());
      same(bytes_a == bytes_b && unary_a == unary_b && word_a == word_b, "write_unary", static_cast<int>(low), count);
    }
  }
  for (std::size_t length = 1; length <= 256; ++length) {
    std::vector<float> left_a(length), left_b;
    for (float& value : left_a) value = static_cast<float>(random() % 2001) / 64 - 15;
    left_b = left_a;
    Bytes bits_a((length + 7) / 8), bits_b(bits_a.size());
    const std::uint16_t scale_a = a.sign_pack(left_a.data(), length, bits_a.data());
    const std::uint16_t scale_b = b.sign_pack(left_b.data(), length, bits_b.data());
    same(scale_a == scale_b && bits_a == bits_b && std::memcmp(left_a.data(), left_b.data(), 4 * length) == 0, "sign_pack", 0,
         length);
    const float scales[] = {0.37f, 1.25f, 3e-9f};
    const std::uint8_t* parts[] = {bits_a.data(), bits_b.data(), bits_a.data()};
    a.sign_unpack_add(left_a.data(), length, scales, parts, 3);
    b.sign_unpack_add(left_b.data(), length, scales, parts, 3);
    same(std::memcmp(left_a.data(), left_b.data(), 4 * length) == 0, "sign_unpack_add", 0, length);
    for (const int bits : {4, 8}) {
      for (float& value : left_a) value = static_cast<float>(random() % 2001) / 64 - 15;
      left_b = left_a;
      Bytes codes_a(bits == 8 ? length : (length + 31) / 32 * 16), codes_b(codes_a.size());
      const QuantisedScale scale_a = a.quantised_scale(left_a.data(), length, bits);
      const QuantisedScale scale_b = b.quantised_scale(left_b.data(), length, bits);
      a.quantised_pack(left_a.data(), length, bits, scale_a, codes_a.data());
      b.quantised_pack(left_b.data(), length, bits, scale_b, codes_b.data());
      same(std::memcmp(&scale_a, &scale_b, sizeof scale_a) == 0 && codes_a == codes_b &&
               std::memcmp(left_a.data(), left_b.data(), 4 * length) == 0,
           "quantised_pack", bits, length);
      const std::uint8_t* messages[] = {codes_a.data(), codes_b.data(), codes_a.data()};
      a.quantised_unpack_add(left_a.data(), length, bits, scales, messages, 3);
      b.quantised_unpack_add(left_b.data(), length, bits, scales, messages, 3);
      same(std::memcmp(left_a.data(), left_b.data(), 4 * length) == 0, "quantised_unpack_add", bits, length);
    }
  }
  std::puts("same");
  return 0;
}
