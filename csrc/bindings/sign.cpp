#include "cpu/sign/sign.hpp"
#include "cpu/sign/top_sign.hpp"

#include "bindings/bind.hpp"

namespace topkube {
namespace {

void require_sizes(std::size_t length, std::size_t scale_bytes, std::size_t bit_bytes) {
  require(scale_bytes == (length + sign_block - 1) / sign_block * sizeof(std::uint16_t), "scales have the wrong length");
  require(bit_bytes == (length + 7) / 8, "bits have the wrong length");
}

// Returns the layout for values of `value_bytes` bytes. Checks the count and the length of the message.
TopSignLayout make_checked_layout(std::size_t value_bytes, std::size_t count, std::size_t message_bytes) {
  const std::size_t length = value_bytes / sizeof(float);
  require(count >= 1 && count <= length, "count outside 1..length");
  require(length < std::size_t{1} << 32, "length does not fit 32-bit indices");
  const TopSignLayout layout(length, count);
  require(message_bytes == layout.bytes, "the message has the wrong length");
  return layout;
}

}  // namespace

void bind_sign(nb::module_& module) {
  module.def(
      "sign_pack",
      [](Bytes values, Bytes scales, Bytes bits) {
        const std::size_t length = values.size() / sizeof(float);
        require_sizes(length, scales.size(), bits.size());
        auto* from = reinterpret_cast<float*>(values.data());
        auto* to_scales = reinterpret_cast<std::uint16_t*>(scales.data());
        std::uint8_t* to_bits = bits.data();
        nb::gil_scoped_release release;
        return sign_pack(from, length, to_scales, to_bits);
      },
      nb::arg("values"), nb::arg("scales"), nb::arg("bits"), "Return True if all scales are finite.");
  module.def(
      "sign_unpack_add",
      [](Bytes values, const std::vector<ConstBytes>& scales, const std::vector<ConstBytes>& bits,
         const std::vector<float>& weights) {
        const std::size_t length = values.size() / sizeof(float);
        require(scales.size() == bits.size() && scales.size() == weights.size(), "scales, bits and weights differ in length");
        std::vector<SignPart> parts;
        for (std::size_t p = 0; p < scales.size(); ++p) {
          require_sizes(length, scales[p].size(), bits[p].size());
          parts.push_back({reinterpret_cast<const std::uint16_t*>(scales[p].data()), bits[p].data(), weights[p]});
        }
        auto* to = reinterpret_cast<float*>(values.data());
        nb::gil_scoped_release release;
        sign_unpack_add(to, length, parts);
      },
      nb::arg("values"), nb::arg("scales"), nb::arg("bits"), nb::arg("weights"));
  module.def(
      "top_sign_bytes",
      [](std::size_t length, std::size_t count) {
        require(count >= 1 && count <= length, "count outside 1..length");
        return TopSignLayout(length, count).bytes;
      },
      nb::arg("length"), nb::arg("count"));
  module.def(
      "top_sign_pack",
      [](Bytes values, std::size_t count, int threads, Bytes message) {
        const TopSignLayout layout = make_checked_layout(values.size(), count, message.size());
        auto* from = reinterpret_cast<float*>(values.data());
        std::uint8_t* to = message.data();
        nb::gil_scoped_release release;
        return top_sign_pack(from, layout, threads, to);
      },
      nb::arg("values"), nb::arg("count"), nb::arg("threads"), nb::arg("message"), "Return True if all scales are finite.");
  module.def(
      "top_sign_unpack_add",
      [](Bytes values, std::size_t count, ConstBytes message, float weight) {
        const TopSignLayout layout = make_checked_layout(values.size(), count, message.size());
        auto* to = reinterpret_cast<float*>(values.data());
        const std::uint8_t* from = message.data();
        nb::gil_scoped_release release;
        return top_sign_unpack_add(to, layout, from, weight);
      },
      nb::arg("values"), nb::arg("count"), nb::arg("message"), nb::arg("weight"), "Return False if the message is damaged.");
}

}  // namespace topkube
