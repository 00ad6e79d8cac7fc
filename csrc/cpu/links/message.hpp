// Messages and reductions, and the batches of messages that somebody waits for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// The sum over all ranks of an array x, which is cut into one segment per rank. Every rank receives its own segment from all
// others, and adds them up in the order of the ranks. If `is_gathered`, it then sends the sum to all of them. A part of a reduction
// does so with part `part` of `parts` of every segment.
struct Reduction : MessageBatch {
  std::uint8_t* x = nullptr;
  std::uint8_t* buffer = nullptr;  // for the segments of the other ranks, in the order of the ranks
  std::size_t length = 0;          // elements of x
  Dtype dtype = Dtype::f32;
  float scale = 1;  // a factor on the sum
  std::uint64_t key = 0;
  bool is_gathered = true;
  std::size_t part = 0, parts = 1;
  std::shared_ptr<void> keeper;
  std::atomic<bool> is_finite{true};                // the own segment, when it is complete
  std::atomic<bool>* is_whole_finite = &is_finite;  // of the reduction of which this is a part
  int awaited = 0;                                  // segments that have not arrived
};

// A message that this rank sends or receives. The keeper keeps the memory at `data` alive.
struct Message {
  std::uint64_t key = 0;
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<void> keeper;
  std::vector<std::shared_ptr<MessageBatch>> batches;  // the greetings of a call are awaited by all its pieces
  std::shared_ptr<Reduction> reduction;                // that needs this message
  bool is_exact = false;                               // a shorter message is an error
  bool is_complete = false;
};

}  // namespace topkube
