#include "cpu/links/ledger.hpp"

#include <utility>

namespace topkube {

std::shared_ptr<MessageBatch> Ledger::gather(const std::vector<std::shared_ptr<Message>>& messages) {
  const std::lock_guard lock(mutex_);
  auto batch = std::make_shared<MessageBatch>();
  int pending = 0;
  for (const auto& message : messages) {
    if (message->is_complete) continue;
    message->batches.push_back(batch);
    ++pending;
  }
  batch->pending = pending;  // nothing counts down before the mutex is free
  return batch;
}

void Ledger::complete(Message& message) {
  std::vector<std::shared_ptr<MessageBatch>> batches;
  {
    const std::lock_guard lock(mutex_);
    message.is_complete = true;
    released_.push_back(std::move(message.keeper));
    batches.swap(message.batches);
  }
  for (const auto& batch : batches) count_down(*batch);
}

void Ledger::count_down(MessageBatch& batch) {
  if (batch.pending.fetch_sub(1) != 1) return;
  if (batch.whole_message)
    complete(*batch.whole_message);
  else if (batch.whole)
    count_down(*batch.whole);
  else
    ++completed_;
}

void Ledger::release(std::shared_ptr<void> keeper) {
  const std::lock_guard lock(mutex_);
  released_.push_back(std::move(keeper));
}

std::vector<std::shared_ptr<void>> Ledger::take_released() {
  const std::lock_guard lock(mutex_);
  return std::move(released_);
}

}  // namespace topkube
