// The record of the messages that become complete, in whatever lane.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/links/message.hpp"

namespace topkube {

// Counts the messages of all lanes that become complete. Any thread may use it.
class Ledger {
 public:
  // Returns the batch of these messages.
  std::shared_ptr<MessageBatch> gather(const std::vector<std::shared_ptr<Message>>& messages);

  void complete(Message& message);
  void count_down(MessageBatch& batch);

  // The batches that were complete so far.
  std::uint64_t completed() const { return completed_; }

  // Keeps the keeper of a message that is complete until `take_released`, whose caller drops it.
  void release(std::shared_ptr<void> keeper);
  std::vector<std::shared_ptr<void>> take_released();

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> released_;
  std::atomic<std::uint64_t> completed_{0};
};

}  // namespace topkube
