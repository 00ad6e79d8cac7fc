// Messages and reductions, and the batches of messages that somebody waits for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/dtype.hpp"

namespace topkube {

struct Message;

// A few messages that somebody waits for. `pending` counts those that are not complete.
struct MessageBatch {
  std::atomic<int> pending{0};
  std::shared_ptr<MessageBatch> whole;     // of which this batch is a part
  std::shared_ptr<Message> whole_message;  // or a message of which these messages are the parts
};

// An exchange with all ranks that the lanes carry out as a whole.
struct Reduction : MessageBatch {
  enum class Kind { dense, greeting, integers };
  explicit Reduction(Kind kind) : kind(kind) {}
  const Kind kind;  // a DenseSum, a Greeting or an IntegerSum
  std::uint64_t key = 0;
  std::shared_ptr<void> keeper;
  std::atomic<bool> is_finite{true};                // what this rank has computed, when it is complete
  std::atomic<bool>* is_whole_finite = &is_finite;  // of the reduction of which this is a part
  int awaited = 0;                                  // segments, or greetings, that have not arrived
};

// The sum over all ranks of an array x, which is cut into one segment per rank. Every rank receives its own segment from all
// others, and adds them up in the order of the ranks. If `is_gathered`, it then sends the sum to all of them. A part of a sum does so
// with part `part` of `parts` of every segment.
struct DenseSum : Reduction {
  explicit DenseSum(Kind kind = Kind::dense) : Reduction(kind) {}
  std::uint8_t* x = nullptr;
  std::uint8_t* buffer = nullptr;  // (ranks - 1) times the longest segment: those of the other ranks, in the order of the ranks
  std::size_t length = 0;          // elements of x
  Dtype dtype = Dtype::f32;
  float scale = 1;  // a factor on the sum
  bool is_gathered = true;
  std::size_t part = 0, parts = 1;
};

// The sum over all ranks of float32 values, of which every rank sends integers (cpu/quantised). It is cut into one segment per rank,
// its owner. The owner adds what the others send of its segment to its own values, and sends them integers of the sum. A part of
// such a sum does so with a part of every segment.
struct IntegerSum : Reduction, std::enable_shared_from_this<IntegerSum> {
  IntegerSum() : Reduction(Kind::integers) {}
  float* change = nullptr;  // the values of this rank, from which what it sends is subtracted
  float* total = nullptr;   // the sum of what the owners send
  int bits = 8;
  // Of the part of the segment of each rank: its elements, what this rank sends to its owner, what arrives from that rank for the
  // own segment, and what its owner sends of the sum.
  struct Piece {
    std::size_t start = 0, stop = 0;
    std::uint8_t *row = nullptr, *arrived = nullptr, *mean = nullptr;
  };
  std::vector<Piece> pieces;
  int computations = 0;                            // that are not done yet
  std::unique_ptr<std::uint8_t[]> memory;          // of all rows
  std::size_t sent_bytes = 0;                      // in both stages
  std::vector<std::shared_ptr<IntegerSum>> split;  // a part for each lane; empty if the first lane has all
  bool has_begun = false;
  // A computation in the first lane, or before it: when it began, its duration, and the processor time of its thread. Nanoseconds.
  struct Computation {
    std::int64_t start, duration, processor;
  };
  std::mutex mutex;
  std::vector<Computation> done;
  IntegerSum* record = nullptr;  // whose `done` shows the computations of this part: the whole, or nothing
};

// What the ranks that enter a call tell each other: a signature of the call, 8 bytes, which is the same on all of them if they entered
// the same call. If `has_values`, the signature is followed by the values of a segment of x, or of all of it if `is_in_one_round`.
// They are added up only if all signatures are the same; if `is_in_one_round` is false, the sums follow.
struct Greeting : DenseSum {
  Greeting() : DenseSum(Kind::greeting) {}
  std::uint64_t signature = 0, greeting_key = 0;
  std::size_t room = 0;  // the most bytes of values of another rank
  bool has_values = false, is_in_one_round = false;
  bool is_abandoned = false;                                                     // nobody waits for the sum, and x may be gone
  std::shared_ptr<MessageBatch> all_greeted = std::make_shared<MessageBatch>();  // complete when `differs` is known
  struct Arrival {
    int rank = 0;
    std::size_t bytes = 0;
    std::unique_ptr<std::uint8_t[]> data;
  };
  std::vector<Arrival> arrivals;     // of the ranks that this rank exchanges greetings with
  std::vector<std::uint8_t> sent;    // all greetings of this rank, side by side
  std::atomic<bool> differs{false};  // a signature does
};

// A message that this rank sends or receives. The keeper keeps the memory at `data` alive. A message that is received without such
// memory gets some when its length is known.
struct Message {
  std::uint64_t key = 0;
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;
  std::unique_ptr<std::uint8_t[]> own;  // memory of this message
  std::size_t place = 0;                // of a greeting among the arrivals, or 1 + the rank whose integers of a sum these are
  std::shared_ptr<void> keeper;
  std::vector<std::shared_ptr<MessageBatch>> batches;  // the greetings of a call are awaited by all its pieces
  std::shared_ptr<Reduction> reduction;                // that needs this message
  bool is_exact = false;                               // a shorter message is an error
  bool is_complete = false;
};

// Returns a message of a reduction. `keeper` keeps the memory at `data` alive.
inline std::shared_ptr<Message> make_message(const std::shared_ptr<Reduction>& reduction, std::shared_ptr<void> keeper,
                                             std::uint8_t* data, std::size_t bytes) {
  auto message = std::make_shared<Message>();
  message->key = reduction->key;
  message->data = data;
  message->bytes = bytes;
  message->is_exact = true;
  message->keeper = std::move(keeper);
  message->batches.push_back(reduction);
  return message;
}

}  // namespace topkube
