#include <memory>
#include <optional>

#include "bindings/bind.hpp"
#include "cpu/node/shared_memory.hpp"

namespace topkube {
namespace {

using Offsets = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Holds a SharedMemory and its window. Python must keep the window alive for as long as the Node.
class Node {
 public:
  Node(Bytes window, int rank, int ranks, int shards, int cells, bool crowded, nb::object poll)
      : window_(std::move(window)), poll_(std::move(poll)), shards_(shards), rank_(rank) {
    require(ranks > 0 && rank >= 0 && rank < ranks && shards > 0 && shards <= ranks && cells > 2,
            "rank, ranks, shards or cells is out of range");
    require(window_.size() >= SharedMemory::window_bytes(ranks, cells), "window is too small");
    require(static_cast<std::size_t>(shards) * 64 <= SharedMemory::cell_bytes, "too many shards");
    memory_ = std::make_unique<SharedMemory>(window_.data(), rank, ranks, shards, cells, crowded);
    memory_->poll = [this] {
      nb::gil_scoped_acquire acquire;
      poll_();
    };
  }

  bool all_reduce(Bytes x, int code, float scale, std::uint64_t signature, double deadline_seconds) {
    const Dtype dtype = dtype_of(code);
    void* data = x.data();
    const std::size_t length = x.size() / item_size(dtype);
    nb::gil_scoped_release release;
    return memory_->all_reduce(data, dtype, length, scale, {signature, deadline_seconds});
  }

  bool reduce_scatter(Bytes x, int code, float scale, std::optional<Floats> out, std::optional<ConstFloats> add,
                      std::uint64_t signature, double deadline_seconds) {
    const Dtype dtype = dtype_of(code);
    void* data = x.data();
    const std::size_t length = x.size() / item_size(dtype);
    const std::size_t shard =
        rank_ < shards_ ? SharedMemory::shard_begin(length, shards_, rank_ + 1) - SharedMemory::shard_begin(length, shards_, rank_)
                        : 0;
    require(!out || out->size() == shard, "out and the shard differ in length");
    require(!add || (out && add->size() == shard), "add and the shard differ in length");
    float* to = out ? out->data() : nullptr;
    const float* addend = add ? add->data() : nullptr;
    // The data pointer of an empty shard may be null, but a null `to` would mean "in place".
    float unused;
    if (out && to == nullptr) to = &unused;
    nb::gil_scoped_release release;
    return memory_->reduce_scatter(data, dtype, length, scale, to, addend, {signature, deadline_seconds});
  }

  void check(std::uint64_t signature, double deadline_seconds) {
    nb::gil_scoped_release release;
    memory_->check({signature, deadline_seconds});
  }

  void all_gather(Bytes x, int item, std::optional<Offsets> bounds, std::uint64_t signature, double deadline_seconds) {
    require(item == 1 || item == 2 || item == 4, "item must be 1, 2 or 4 bytes");
    const std::size_t length = x.size() / static_cast<std::size_t>(item);
    if (bounds) {
      require(bounds->size() == static_cast<std::size_t>(shards_) + 1, "bounds must have one entry more than shards");
      for (int i = 0; i < shards_; ++i) require(bounds->data()[i] <= bounds->data()[i + 1], "bounds must ascend");
      require(bounds->data()[shards_] <= length, "bounds exceed the array");
    }
    void* data = x.data();
    const std::uint64_t* offsets = bounds ? bounds->data() : nullptr;
    nb::gil_scoped_release release;
    memory_->all_gather(data, static_cast<std::size_t>(item), length, offsets, {signature, deadline_seconds});
  }

 private:
  Bytes window_;
  nb::object poll_;
  int shards_, rank_;
  std::unique_ptr<SharedMemory> memory_;
};

}  // namespace

void bind_node(nb::module_& module) {
  static nb::exception<NodeTimeout> timeout(module, "NodeTimeout");
  static nb::exception<NodeMismatch> mismatch(module, "NodeMismatch");
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    const auto raise = [](nb::handle type, const std::vector<int>& ranks) {
      nb::list list;
      for (const int rank : ranks) list.append(rank);
      PyErr_SetObject(type.ptr(), nb::tuple(list).ptr());
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const NodeTimeout& error) {
      raise(timeout, error.missing);
    } catch (const NodeMismatch& error) {
      raise(mismatch, error.different);
    }
  });
  nb::class_<Node>(module, "Node")
      .def(nb::init<Bytes, int, int, int, int, bool, nb::object>(), nb::arg("window"), nb::arg("rank"), nb::arg("ranks"),
           nb::arg("shards"), nb::arg("cells"), nb::arg("crowded"), nb::arg("poll"))
      .def_static("window_bytes", &SharedMemory::window_bytes, nb::arg("ranks"), nb::arg("cells"))
      .def("all_reduce", &Node::all_reduce, nb::arg("x"), nb::arg("dtype"), nb::arg("scale"), nb::arg("signature"),
           nb::arg("deadline_seconds"))
      .def("reduce_scatter", &Node::reduce_scatter, nb::arg("x"), nb::arg("dtype"), nb::arg("scale"), nb::arg("out").none(),
           nb::arg("add").none(), nb::arg("signature"), nb::arg("deadline_seconds"))
      .def("check", &Node::check, nb::arg("signature"), nb::arg("deadline_seconds"))
      .def("all_gather", &Node::all_gather, nb::arg("x"), nb::arg("item"), nb::arg("bounds").none(), nb::arg("signature"),
           nb::arg("deadline_seconds"));
}

}  // namespace topkube
