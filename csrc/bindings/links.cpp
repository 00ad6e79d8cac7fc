#include <algorithm>
#include <memory>
#include <set>

#include <nanobind/stl/shared_ptr.h>

#include "bindings/bind.hpp"
#include "cpu/links/tcp_links.hpp"
#include "cpu/quantised/layout.hpp"

namespace topkube {
namespace {

using MessagePointer = std::shared_ptr<Message>;
using Releases = nb::call_guard<nb::gil_scoped_release>;

// Keeps a Python object alive until a message is complete, which it may become in a thread without the interpreter's lock.
std::shared_ptr<void> keep(nb::handle object) {
  return {object.inc_ref().ptr(), [](PyObject* kept) {
            if (!Py_IsInitialized()) return;
            nb::gil_scoped_acquire acquire;
            Py_DECREF(kept);
          }};
}

MessagePointer make_message(std::uint64_t key, std::uint8_t* data, std::size_t bytes, nb::handle array) {
  auto message = std::make_shared<Message>();
  message->key = key;
  message->data = data;
  message->bytes = bytes;
  message->keeper = keep(array);
  return message;
}

std::shared_ptr<Greeting> make_greeting(const TcpLinks& links, const std::vector<int>& partners, std::uint64_t signature,
                                        std::uint64_t key, std::size_t room) {
  auto greeting = std::make_shared<Greeting>();
  for (const int partner : partners) {
    require(partner >= 0 && static_cast<std::size_t>(partner) < links.ranks() && partner != links.rank(), "there is no such rank");
    greeting->arrivals.push_back({partner, 0, nullptr});
  }
  greeting->signature = signature;
  greeting->greeting_key = key;
  greeting->room = room;
  return greeting;
}

// Calls `work` without the interpreter's lock, then drops what messages no longer need.
template <class Work>
void run(TcpLinks& links, Work work) {
  std::vector<std::shared_ptr<void>> released;
  {
    nb::gil_scoped_release release;
    work();
    released = links.take_released();
  }
}

void require_lane(const TcpLinks& links, int lane) {
  require(lane == TcpLinks::all_lanes || (lane >= 0 && lane < static_cast<int>(links.lanes())), "there is no such lane");
}

template <class Array>
Array view(nb::handle array) {
  return nb::cast<Array>(array, false);  // without a copy
}

}  // namespace

void bind_links(nb::module_& module) {
  nb::class_<Message>(module, "TcpMessage");
  nb::class_<MessageBatch>(module, "TcpMessages").def_prop_ro("are_complete", [](const MessageBatch& batch) {
    return batch.pending.load() == 0;
  });
  nb::class_<Reduction, MessageBatch>(module, "TcpReduction").def_prop_ro("is_finite", [](const Reduction& reduction) {
    return reduction.is_finite.load();
  });
  nb::class_<IntegerSum, Reduction>(module, "TcpIntegerSum")
      .def("take_computations",
           [](IntegerSum& sum) {
             std::vector<IntegerSum::Computation> done;
             {
               const std::lock_guard lock(sum.mutex);
               done = sum.done;
               sum.done.clear();  // it keeps its memory
             }
             nb::list taken;
             for (const auto& one : done) taken.append(nb::make_tuple(one.start, one.duration, one.processor));
             return taken;
           })
      .def_prop_ro("sent_bytes", [](const IntegerSum& sum) { return sum.sent_bytes; });
  nb::class_<DenseSum, Reduction>(module, "TcpDenseSum");
  nb::class_<Greeting, DenseSum>(module, "TcpGreeting")
      .def_prop_ro("differs", [](const Greeting& greeting) { return greeting.differs.load(); })
      .def_prop_ro("all_greeted", [](const Greeting& greeting) { return greeting.all_greeted; });
  nb::class_<TcpLinks>(module, "TcpLinks")
      .def(
          "__init__",
          [](TcpLinks* self, int rank, int ranks, const std::vector<int>& listeners, nb::bytes own, nb::bytes answer) {
            require(rank >= 0 && rank < ranks, "rank is out of range");
            require(!listeners.empty(), "there is no listening socket");
            require(own.size() == TcpLinks::token_bytes && answer.size() == TcpLinks::token_bytes, "a token has 16 bytes");
            new (self) TcpLinks(rank, ranks, listeners, {own.c_str(), own.size()}, {answer.c_str(), answer.size()});
          },
          nb::arg("rank"), nb::arg("ranks"), nb::arg("listeners"), nb::arg("own"), nb::arg("answer"))
      .def_prop_ro("lanes", &TcpLinks::lanes)
      .def(
          "set_peer",
          [](TcpLinks& self, int peer, const std::string& address, const std::vector<int>& ports, nb::bytes own, nb::bytes answer) {
            require(ports.size() == self.lanes(), "a peer has one port for each lane");
            require(own.size() == TcpLinks::token_bytes && answer.size() == TcpLinks::token_bytes, "a token has 16 bytes");
            return self.set_peer(peer, address, ports, {own.c_str(), own.size()}, {answer.c_str(), answer.size()});
          },
          nb::arg("peer"), nb::arg("address"), nb::arg("ports"), nb::arg("own"), nb::arg("answer"))
      .def(
          "send",
          [](TcpLinks& self, nb::object array, int peer, std::uint64_t key, int lane) {
            const auto bytes = view<ConstBytes>(array);
            require_lane(self, lane);
            auto message = make_message(key, const_cast<std::uint8_t*>(bytes.data()), bytes.size(), array);
            nb::gil_scoped_release release;
            self.send(peer, message, lane);
            return message;
          },
          nb::arg("array"), nb::arg("peer"), nb::arg("key"), nb::arg("lane") = TcpLinks::all_lanes)
      .def(
          "receive",
          [](TcpLinks& self, nb::object array, int peer, std::uint64_t key, int lane) {
            const auto bytes = view<Bytes>(array);
            require_lane(self, lane);
            auto message = make_message(key, bytes.data(), bytes.size(), array);
            run(self, [&] { self.receive(peer, message, lane); });
            return message;
          },
          nb::arg("array"), nb::arg("peer"), nb::arg("key"), nb::arg("lane") = TcpLinks::all_lanes)
      .def(
          "reduce",
          [](TcpLinks& self, nb::object x, nb::object buffer, int code, float scale, std::uint64_t key, bool is_gathered) {
            const auto values = view<Bytes>(x), space = view<Bytes>(buffer);
            auto reduction = std::make_shared<DenseSum>();
            reduction->dtype = dtype_of(code);
            reduction->length = values.size() / item_size(reduction->dtype);
            const std::size_t ranks = self.ranks(), longest = (reduction->length + ranks - 1) / ranks;
            require(space.size() >= (ranks - 1) * longest * item_size(reduction->dtype), "the buffer is too short");
            reduction->x = values.data();
            reduction->buffer = space.data();
            reduction->scale = scale;
            reduction->key = key;
            reduction->is_gathered = is_gathered;
            reduction->keeper = keep(nb::make_tuple(x, buffer));
            run(self, [&] { self.reduce(reduction); });
            return reduction;
          },
          nb::arg("x"), nb::arg("buffer"), nb::arg("dtype"), nb::arg("scale"), nb::arg("key"), nb::arg("is_gathered"))
      .def(
          "prepare_integers",
          [](TcpLinks& self, nb::object change, nb::object total, const std::vector<std::size_t>& bounds, int bits,
             std::uint64_t key) {
            const auto from = view<Bytes>(change), to = view<Bytes>(total);
            require(bits == 3 || bits == 4 || bits == 8, "bits must be 3, 4 or 8");
            require(bounds.size() == self.ranks() + 1 && bounds.front() == 0 && std::is_sorted(bounds.begin(), bounds.end()),
                    "there is one segment for each rank");
            for (const std::size_t bound : bounds)
              require(bound % quantised_block == 0 || bound == bounds.back(), "a block of integers cannot be cut");
            require(from.size() == bounds.back() * sizeof(float) && to.size() == from.size(), "the arrays have the wrong length");
            auto keeper = keep(nb::make_tuple(change, total));
            auto *values = reinterpret_cast<float*>(from.data()), *sums = reinterpret_cast<float*>(to.data());
            nb::gil_scoped_release release;
            return self.prepare_integers(values, sums, bounds, bits, key, std::move(keeper));
          },
          nb::arg("change"), nb::arg("total"), nb::arg("bounds"), nb::arg("bits"), nb::arg("key"))
      .def(
          "begin_integers",
          // Not a shared_ptr that nanobind makes: its last owner, which may be the thread of a lane, would need the
          // interpreter's lock.
          [](TcpLinks& self, IntegerSum& sum) { run(self, [&] { self.begin_integers(sum.shared_from_this()); }); }, nb::arg("sum"))
      .def(
          "greet",
          [](TcpLinks& self, const std::vector<int>& partners, std::uint64_t signature, std::uint64_t key, std::size_t room) {
            auto greeting = make_greeting(self, partners, signature, key, room);
            run(self, [&] { self.greet(greeting); });
            return greeting;
          },
          nb::arg("partners"), nb::arg("signature"), nb::arg("key"), nb::arg("room"))
      .def(
          "greet_and_reduce",
          [](TcpLinks& self, const std::vector<int>& partners, std::uint64_t signature, std::uint64_t key, std::size_t room,
             nb::object x, int code, float scale, std::uint64_t sums_key, bool is_in_one_round) {
            const auto values = view<Bytes>(x);
            auto greeting = make_greeting(self, partners, signature, key, room);
            require(std::set(partners.begin(), partners.end()).size() == partners.size() && partners.size() + 1 == self.ranks(),
                    "a sum needs the values of all ranks");
            greeting->has_values = true;
            greeting->dtype = dtype_of(code);
            greeting->length = values.size() / item_size(greeting->dtype);
            greeting->x = values.data();
            greeting->scale = scale;
            greeting->key = sums_key;
            greeting->is_in_one_round = is_in_one_round;
            greeting->keeper = keep(x);
            run(self, [&] { self.greet(greeting); });
            return greeting;
          },
          nb::arg("partners"), nb::arg("signature"), nb::arg("key"), nb::arg("room"), nb::arg("x"), nb::arg("dtype"),
          nb::arg("scale"), nb::arg("sums_key"), nb::arg("is_in_one_round"))
      .def(
          "abandon", [](TcpLinks& self, Greeting& greeting) { self.abandon(greeting); }, nb::arg("greeting"), Releases())
      .def("gather", &TcpLinks::gather, nb::arg("messages"), Releases())
      .def("advance", [](TcpLinks& self) { run(self, [&] { self.advance(); }); })
      .def(
          "wait", [](TcpLinks& self, double seconds, double spinning) { run(self, [&] { self.wait(seconds, spinning); }); },
          nb::arg("seconds"), nb::arg("spinning") = 0)
      .def("wake", &TcpLinks::wake, Releases())
      .def("has_sent_all", &TcpLinks::has_sent_all, Releases())
      .def("list_unawaited", &TcpLinks::list_unawaited, Releases())
      .def("list_broken", &TcpLinks::list_broken, Releases())
      .def("close", &TcpLinks::close, Releases());
}

}  // namespace topkube
