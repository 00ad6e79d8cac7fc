#include "cpu/quantised/quantised.hpp"

#include "bindings/bind.hpp"

namespace topkube {
namespace {

QuantisedLayout make_checked_layout(std::size_t length, int bits) {
  require(bits == 3 || bits == 4 || bits == 8, "bits must be 3, 4 or 8");
  return QuantisedLayout(length, bits);
}

}  // namespace

void bind_quantised(nb::module_& module) {
  module.def(
      "quantised_bytes", [](std::size_t length, int bits) { return make_checked_layout(length, bits).bytes; }, nb::arg("length"),
      nb::arg("bits"));
  module.def(
      "quantised_pack",
      [](Bytes values, int bits, Bytes message) {
        const QuantisedLayout layout = make_checked_layout(values.size() / sizeof(float), bits);
        require(message.size() == layout.bytes, "the message has the wrong length");
        auto* from = reinterpret_cast<float*>(values.data());
        std::uint8_t* to = message.data();
        nb::gil_scoped_release release;
        return quantised_pack(from, layout, to);
      },
      nb::arg("values"), nb::arg("bits"), nb::arg("message"), "Return True if all scales are finite.");
  module.def(
      "quantised_unpack_add",
      [](Bytes values, int bits, const std::vector<ConstBytes>& messages, const std::vector<float>& weights, bool replaces) {
        const QuantisedLayout layout = make_checked_layout(values.size() / sizeof(float), bits);
        require(messages.size() == weights.size(), "messages and weights differ in length");
        std::vector<const std::uint8_t*> from;
        for (const ConstBytes& message : messages) {
          require(message.size() == layout.bytes, "a message has the wrong length");
          from.push_back(message.data());
        }
        auto* to = reinterpret_cast<float*>(values.data());
        nb::gil_scoped_release release;
        quantised_unpack_add(to, layout, from, weights, replaces);
      },
      nb::arg("values"), nb::arg("bits"), nb::arg("messages"), nb::arg("weights"), nb::arg("replaces"));
}

}  // namespace topkube
