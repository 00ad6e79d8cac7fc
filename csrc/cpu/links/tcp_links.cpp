#include "cpu/links/tcp_links.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace topkube {
namespace {

// Shorter parts cost more than the other lanes save.
constexpr std::size_t least_part_bytes = 256 << 10;

// Blocks all signals in this thread, and in the threads that it starts, until its end.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

TcpLinks::TcpLinks(int rank, int ranks, const std::vector<int>& listeners, const Token& own, const Token& answer)
    : rank_(rank), ranks_(static_cast<std::size_t>(ranks)), process_(::getpid()) {
  std::size_t made = 0;
  try {
    for (const int listener : listeners) {
      ++made;  // a lane closes its listener, also if it cannot be made
      lanes_.push_back(std::make_unique<Lane>(rank, ranks, listener, own, answer, ledger_));
    }
    const SignalsBlocked blocked;  // in the new threads: signals are for those of Python
    for (std::size_t i = 1; i < lanes_.size(); ++i) {
      Lane &lane = *lanes_[i], &first = *lanes_.front();
      threads_.emplace_back([&lane, &first] { lane.serve([&first] { first.notify(); }); });
      ::pthread_setname_np(threads_.back().native_handle(), "topkube-link");
    }
  } catch (...) {
    for (; made < listeners.size(); ++made) ::close(listeners[made]);
    close();
    throw;
  }
}

TcpLinks::~TcpLinks() {
  close();
  // A thread may have been at work in a lane when this child was forked.
  if (::getpid() != process_)
    for (auto& lane : lanes_) static_cast<void>(lane.release());
}

void TcpLinks::close() {
  const bool is_child = ::getpid() != process_;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (is_child)
      lanes_[i]->close_in_child();
    else
      lanes_[i]->close();
  }
  // In a child, other threads may have the memory of these by now, so nothing may touch them.
  if (is_child) static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool TcpLinks::set_peer(int peer, const std::string& address, const std::vector<int>& ports, const Token& own,
                        const Token& answer) {
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!lanes_[i]->set_peer(peer, address, ports.at(i), own, answer)) return false;
  return true;
}

std::size_t TcpLinks::count_parts(std::size_t bytes) const { return std::clamp(bytes / least_part_bytes, std::size_t{1}, lanes()); }

void TcpLinks::give(std::size_t lane, Order order) {
  if (lane == 0)
    lanes_[0]->begin(std::move(order));
  else
    lanes_[lane]->post(std::move(order));
}

void TcpLinks::begin(int peer, const std::shared_ptr<Message>& message, bool sends, int lane) {
  if (peer < 0 || static_cast<std::size_t>(peer) >= ranks_) throw std::out_of_range("there is no such rank");
  if (lane == all_lanes) message->is_exact = true;  // several lanes have to cut it alike on both sides
  const std::size_t parts = lane == all_lanes ? count_parts(message->bytes) : 1;
  if (parts == 1) {
    give(lane == all_lanes ? 0 : static_cast<std::size_t>(lane), {peer, sends, message, nullptr});
    return;
  }
  auto batch = std::make_shared<MessageBatch>();
  batch->pending = static_cast<int>(parts);
  batch->whole_message = message;
  for (std::size_t i = parts; i-- > 0;) {  // the first lane last: the others begin meanwhile
    const std::size_t start = message->bytes * i / parts, stop = message->bytes * (i + 1) / parts;
    auto part = std::make_shared<Message>();
    part->key = message->key;
    part->data = message->data + start;
    part->bytes = stop - start;
    part->is_exact = true;
    part->batches.push_back(batch);
    give(i, {peer, sends, std::move(part), nullptr});
  }
}

void TcpLinks::send(int peer, const std::shared_ptr<Message>& message, int lane) { begin(peer, message, true, lane); }

void TcpLinks::receive(int peer, const std::shared_ptr<Message>& message, int lane) { begin(peer, message, false, lane); }

void TcpLinks::reduce(const std::shared_ptr<DenseSum>& reduction) {
  const std::size_t parts = count_parts(reduction->length / ranks_ * item_size(reduction->dtype));
  if (parts == 1) {
    give(0, {-1, false, nullptr, reduction});
    return;
  }
  reduction->pending = static_cast<int>(parts);
  const std::shared_ptr<void> keeper = std::move(reduction->keeper);  // the parts keep it, and hand it to the ledger
  for (std::size_t i = parts; i-- > 0;) {
    auto part = std::make_shared<DenseSum>();
    part->x = reduction->x;
    part->buffer = reduction->buffer;
    part->length = reduction->length;
    part->dtype = reduction->dtype;
    part->scale = reduction->scale;
    part->key = reduction->key;
    part->is_gathered = reduction->is_gathered;
    part->part = i;
    part->parts = parts;
    part->keeper = keeper;
    part->whole = reduction;
    part->is_whole_finite = &reduction->is_finite;
    give(i, {-1, false, nullptr, std::move(part)});
  }
}

bool TcpLinks::has_sent_all() {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->has_sent_all(); });
}

std::vector<std::pair<int, std::string>> TcpLinks::list_broken() {
  std::vector<std::pair<int, std::string>> all;
  for (const auto& lane : lanes_) {
    for (auto& broken : lane->list_broken()) {
      const bool is_new = std::none_of(all.begin(), all.end(), [&](const auto& other) { return other.first == broken.first; });
      if (is_new) all.push_back(std::move(broken));
    }
  }
  return all;
}

}  // namespace topkube
