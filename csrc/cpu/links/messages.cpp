// The part of TcpLinks that matches messages with those who wait for them, and adds up segments.
#include <algorithm>
#include <cstring>

#include "cpu/links/tcp_links.hpp"
#include "cpu/reduction/reduce.hpp"

namespace topkube {

void TcpLinks::send(int number, std::shared_ptr<Message> message) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_.at(static_cast<std::size_t>(number));
  peer.sending.push_back(std::move(message));
  begin_connection(number);
}

void TcpLinks::receive(int number, std::shared_ptr<Message> message) {
  const std::lock_guard lock(mutex_);
  expect(number, std::move(message));
}

bool TcpLinks::fits(const Message& message, std::size_t bytes) {
  return message.is_exact ? bytes == message.bytes : bytes <= message.bytes;
}

void TcpLinks::expect(int number, std::shared_ptr<Message> message) {
  Peer& peer = peers_.at(static_cast<std::size_t>(number));
  if (match_aside(peer, *message)) return;
  peer.awaited.push_back(std::move(message));
  if (peer.arriving_aside && peer.arriving_aside->key == peer.awaited.back()->key) {
    // This message has begun to arrive: the bytes that follow go straight to their place.
    if (!fits(*peer.awaited.back(), peer.length)) {
      fail_by_length(peer, peer.length, peer.awaited.back()->bytes);
      return;
    }
    peer.arriving = std::move(peer.awaited.back());
    peer.awaited.pop_back();
    std::memcpy(peer.arriving->data, peer.arriving_aside->data.get(), peer.arrived - header_bytes);
    peer.arriving_aside.reset();
  }
  begin_connection(number);
}

bool TcpLinks::match_aside(Peer& peer, Message& message) {
  const auto found =
      std::find_if(peer.asides.begin(), peer.asides.end(), [&](const Aside& aside) { return aside.key == message.key; });
  if (found == peer.asides.end()) return false;
  if (!fits(message, found->bytes)) {
    fail_by_length(peer, found->bytes, message.bytes);
    return false;
  }
  std::memcpy(message.data, found->data.get(), found->bytes);
  peer.asides.erase(found);
  complete(message);
  return true;
}

std::shared_ptr<MessageBatch> TcpLinks::gather(const std::vector<std::shared_ptr<Message>>& messages) {
  const std::lock_guard lock(mutex_);
  auto batch = std::make_shared<MessageBatch>();
  int pending = 0;
  for (const auto& message : messages) {
    if (message->is_complete) continue;
    message->batches.push_back(batch);
    ++pending;
  }
  batch->pending = pending;
  return batch;
}

void TcpLinks::complete(Message& message) {
  message.is_complete = true;
  released_.push_back(std::move(message.keeper));
  for (const auto& batch : message.batches) count_down(*batch);
  message.batches.clear();
  if (message.reduction && --message.reduction->awaited == 0) ready_.push_back(message.reduction);
  message.reduction.reset();
}

void TcpLinks::count_down(MessageBatch& batch) {
  if (batch.pending.fetch_sub(1) == 1) ++completed_;
}

namespace {

std::shared_ptr<Message> make_part(const std::shared_ptr<Reduction>& reduction, std::uint8_t* data, std::size_t bytes) {
  auto message = std::make_shared<Message>();
  message->key = reduction->key;
  message->data = data;
  message->bytes = bytes;
  message->is_exact = true;
  message->keeper = reduction->keeper;
  message->batches.push_back(reduction);
  return message;
}

}  // namespace

void TcpLinks::reduce(std::shared_ptr<Reduction> reduction) {
  const std::lock_guard lock(mutex_);
  const std::size_t ranks = peers_.size(), item = item_size(reduction->dtype);
  const auto bound = [&](std::size_t i) { return reduction->length * i / ranks; };
  const auto me = static_cast<std::size_t>(rank_);
  const std::size_t own_bytes = (bound(me + 1) - bound(me)) * item;
  const int others = static_cast<int>(ranks) - 1;
  reduction->awaited = others;
  reduction->pending = (reduction->is_gathered ? 4 : 2) * others + 1;
  const auto make = [&](std::uint8_t* data, std::size_t bytes) { return make_part(reduction, data, bytes); };
  for (std::size_t i = 1; i < ranks; ++i) {
    const std::size_t p = (me + i) % ranks;  // every rank begins with another one
    auto segment = make(reduction->buffer + (p - (p > me)) * own_bytes, own_bytes);
    segment->reduction = reduction;
    expect(static_cast<int>(p), std::move(segment));
    std::uint8_t* theirs = reduction->x + bound(p) * item;
    const std::size_t bytes = (bound(p + 1) - bound(p)) * item;
    peers_[p].sending.push_back(make(theirs, bytes));
    begin_connection(static_cast<int>(p));
    // The sum of that segment arrives only after that rank has received ours.
    if (reduction->is_gathered) expect(static_cast<int>(p), make(theirs, bytes));
  }
  if (others == 0) ready_.push_back(reduction);
}

void TcpLinks::add_up(Reduction& reduction) {
  const std::size_t ranks = peers_.size(), item = item_size(reduction.dtype), me = static_cast<std::size_t>(rank_);
  const std::size_t start = reduction.length * me / ranks, stop = reduction.length * (me + 1) / ranks, length = stop - start;
  std::uint8_t* own = reduction.x + start * item;
  std::vector<const void*> inputs(ranks);
  for (std::size_t p = 0; p < ranks; ++p) inputs[p] = p == me ? own : reduction.buffer + (p - (p > me)) * length * item;
  sum(own, reduction.dtype, inputs.data(), ranks, reduction.dtype, length, reduction.scale);
  reduction.is_finite = is_finite(own, reduction.dtype, length);
}

void TcpLinks::send_sums(const std::shared_ptr<Reduction>& reduction) {
  const std::size_t ranks = peers_.size(), item = item_size(reduction->dtype), me = static_cast<std::size_t>(rank_);
  const std::size_t start = reduction->length * me / ranks, stop = reduction->length * (me + 1) / ranks;
  for (std::size_t i = 1; i < ranks; ++i)
    peers_[(me + i) % ranks].sending.push_back(make_part(reduction, reduction->x + start * item, (stop - start) * item));
}

void TcpLinks::fail_by_length(Peer& peer, std::size_t sent, std::size_t expected) {
  fail(peer, "sent a message of " + std::to_string(sent) + " bytes, but this rank expects " + std::to_string(expected));
}

void TcpLinks::fail(Peer& peer, const std::string& trouble) {
  if (peer.trouble.empty()) peer.trouble = trouble;
}

std::vector<std::pair<int, std::string>> TcpLinks::list_broken() {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<int, std::string>> broken;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    // A rank that has ended is no problem for ranks that wait for nothing of it.
    if (!peer.trouble.empty() && !(peer.sending.empty() && peer.awaited.empty() && !peer.arriving))
      broken.emplace_back(static_cast<int>(i), peer.trouble);
  }
  return broken;
}

}  // namespace topkube
