#include <algorithm>

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

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The place of the scales and the bits of `length` values that follow those of other tensors, in a message.
struct SignPlace {
  std::size_t scales, bits, end;
  SignPlace(std::size_t start, std::size_t length)
      : scales(start),
        bits(start + (length + sign_block - 1) / sign_block * sizeof(std::uint16_t)),
        end((bits + (length + 7) / 8 + 7) / 8 * 8) {}
};

// Calls act(number of the tensor, its length, its place) for each tensor of a message. Checks the length of the message first.
template <class Tensors, class Act>
void for_each_tensor(const Tensors& tensors, std::size_t message_bytes, const Act& act) {
  std::size_t end = 0;
  for (const auto& tensor : tensors) end = SignPlace(end, tensor.size()).end;
  require(end <= message_bytes, "the message is too short for these tensors");
  end = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const SignPlace place(end, tensors[i].size());
    act(i, tensors[i].size(), place);
    end = place.end;
  }
}

void bind_sign(nb::module_& module) {
  module.def(
      "sign_pack_differences",
      [](const std::vector<ConstFloats>& tensors, const std::vector<ConstFloats>& bases, Bytes message) {
        require(tensors.size() == bases.size(), "tensors and bases differ in number");
        for (std::size_t i = 0; i < tensors.size(); ++i)
          require(tensors[i].size() == bases[i].size(), "a tensor and its base differ in length");
        nb::gil_scoped_release release;
        bool finite = true;
        for_each_tensor(tensors, message.size(), [&](std::size_t i, std::size_t length, const SignPlace& place) {
          finite &=
              sign_pack_difference(tensors[i].data(), bases[i].data(), length,
                                   reinterpret_cast<std::uint16_t*>(message.data() + place.scales), message.data() + place.bits);
        });
        return finite;
      },
      nb::arg("tensors").noconvert(), nb::arg("bases").noconvert(), nb::arg("message").noconvert(),
      "Return True if all scales are finite.");
  module.def(
      "sign_unpack_add_tensors",
      [](const std::vector<Floats>& tensors, const std::vector<ConstBytes>& messages, const std::vector<float>& weights) {
        require(messages.size() == weights.size(), "messages and weights differ in number");
        std::size_t shortest = static_cast<std::size_t>(-1);
        for (const ConstBytes& message : messages) shortest = std::min(shortest, message.size());
        nb::gil_scoped_release release;
        std::vector<SignPart> parts(messages.size());
        for_each_tensor(tensors, shortest, [&](std::size_t i, std::size_t length, const SignPlace& place) {
          for (std::size_t m = 0; m < messages.size(); ++m) {
            const std::uint8_t* message = messages[m].data();
            parts[m] = {reinterpret_cast<const std::uint16_t*>(message + place.scales), message + place.bits, weights[m]};
          }
          sign_unpack_add(tensors[i].data(), length, parts);
        });
      },
      nb::arg("tensors").noconvert(), nb::arg("messages").noconvert(), nb::arg("weights"));
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
