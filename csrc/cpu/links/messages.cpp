// The part of Lane that matches messages with those who wait for them, and adds up segments.
#include <algorithm>
#include <cstring>

#include "cpu/links/lane.hpp"
#include "cpu/links/socket_calls.hpp"
#include "cpu/reduction/reduce.hpp"

namespace topkube {

void Lane::begin_sending(int number, std::shared_ptr<Message> message) {
  peers_.at(static_cast<std::size_t>(number)).sending.push_back(std::move(message));
  begin_connection(number);
}

bool Lane::fits(const Message& message, std::size_t bytes) {
  return message.is_exact ? bytes == message.bytes : bytes <= message.bytes;
}

void Lane::expect(int number, std::shared_ptr<Message> message) {
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
    if (peer.arriving->data == nullptr)
      give_memory(*peer.arriving, std::move(peer.arriving_aside->data), peer.length);
    else
      std::memcpy(peer.arriving->data, peer.arriving_aside->data.get(), peer.arrived - header_bytes);
    peer.arriving_aside.reset();
  }
  begin_connection(number);
}

bool Lane::match_aside(Peer& peer, Message& message) {
  const auto found =
      std::find_if(peer.asides.begin(), peer.asides.end(), [&](const Aside& aside) { return aside.key == message.key; });
  if (found == peer.asides.end()) return false;
  if (!fits(message, found->bytes)) {
    fail_by_length(peer, found->bytes, message.bytes);
    return false;
  }
  if (message.data == nullptr)
    give_memory(message, std::move(found->data), found->bytes);
  else
    std::memcpy(message.data, found->data.get(), found->bytes);
  peer.asides.erase(found);
  complete(message);
  return true;
}

void Lane::give_memory(Message& message, std::unique_ptr<std::uint8_t[]> memory, std::size_t bytes) {
  message.own = std::move(memory);
  message.data = message.own.get();
  message.bytes = bytes;
}

void Lane::complete(Message& message) {
  const auto has_kind = [&](Reduction::Kind kind) { return message.reduction && message.reduction->kind == kind; };
  if (has_kind(Reduction::Kind::greeting)) {
    Greeting::Arrival& arrival = static_cast<Greeting&>(*message.reduction).arrivals[message.place];
    arrival.data = std::move(message.own);
    arrival.bytes = message.bytes;
  }
  ledger_.complete(message);
  if (has_kind(Reduction::Kind::integers) && message.place > 0)
    ready_.push_back({message.reduction, message.place});
  else if (message.reduction && --message.reduction->awaited == 0)
    ready_.push_front({message.reduction, 0});  // other ranks wait for its sum
  message.reduction.reset();
}

namespace {

// The elements [start, stop) of x: this lane's part of segment p.
struct Part {
  Part(const DenseSum& reduction, std::size_t p, std::size_t ranks) {
    const std::size_t first = reduction.length * p / ranks, length = reduction.length * (p + 1) / ranks - first;
    start = first + length * reduction.part / reduction.parts;
    stop = first + length * (reduction.part + 1) / reduction.parts;
    offset = start - first;
  }
  Part(std::size_t start, std::size_t stop) : start(start), stop(stop) {}
  std::size_t length() const { return stop - start; }
  std::size_t start, stop;
  std::size_t offset = 0;  // in the segment
};

// Where the segment of rank p arrives, of which `part` is a part.
std::uint8_t* find_place(const DenseSum& reduction, std::size_t p, std::size_t me, std::size_t ranks, const Part& part) {
  const std::size_t longest = reduction.length * (me + 1) / ranks - reduction.length * me / ranks;
  return reduction.buffer + ((p - (p > me)) * longest + part.offset) * item_size(reduction.dtype);
}

}  // namespace

void Lane::begin_sum(const std::shared_ptr<DenseSum>& reduction) {
  const std::size_t ranks = peers_.size(), item = item_size(reduction->dtype), me = static_cast<std::size_t>(rank_);
  const Part own(*reduction, me, ranks);
  const int others = static_cast<int>(ranks) - 1;
  reduction->awaited = others;
  reduction->pending = (reduction->is_gathered ? 4 : 2) * others + 1;
  const auto make = [&](std::uint8_t* data, std::size_t length) {
    return make_message(reduction, reduction->keeper, data, length * item);
  };
  for (std::size_t i = 1; i < ranks; ++i) {
    const std::size_t p = (me + i) % ranks;  // every rank begins with another one
    auto segment = make(find_place(*reduction, p, me, ranks, own), own.length());
    segment->reduction = reduction;
    expect(static_cast<int>(p), std::move(segment));
    const Part theirs(*reduction, p, ranks);
    std::uint8_t* data = reduction->x + theirs.start * item;
    begin_sending(static_cast<int>(p), make(data, theirs.length()));
    // The sum of that segment arrives only after that rank has received ours.
    if (reduction->is_gathered) expect(static_cast<int>(p), make(data, theirs.length()));
  }
  if (others == 0) ready_.push_back({reduction, 0});
}

void Lane::add_up(DenseSum& reduction) {
  const std::size_t ranks = peers_.size(), me = static_cast<std::size_t>(rank_);
  const Part part(reduction, me, ranks);
  std::uint8_t* own = reduction.x + part.start * item_size(reduction.dtype);
  std::vector<const void*> inputs(ranks);
  for (std::size_t p = 0; p < ranks; ++p) inputs[p] = p == me ? own : find_place(reduction, p, me, ranks, part);
  sum(own, reduction.dtype, inputs.data(), ranks, reduction.dtype, part.length(), reduction.scale);
  if (!is_finite(own, reduction.dtype, part.length())) *reduction.is_whole_finite = false;
}

void Lane::send_sums(const std::shared_ptr<DenseSum>& reduction) {
  const std::size_t ranks = peers_.size(), item = item_size(reduction->dtype), me = static_cast<std::size_t>(rank_);
  const Part own(*reduction, me, ranks);
  for (std::size_t i = 1; i < ranks; ++i)
    peers_[(me + i) % ranks].sending.push_back(
        make_message(reduction, reduction->keeper, reduction->x + own.start * item, own.length() * item));
}

namespace {

constexpr std::size_t signature_bytes = sizeof Greeting::signature;

// The bytes of the values that rank p gets with a greeting.
std::size_t count_value_bytes(const Greeting& greeting, std::size_t p, std::size_t ranks) {
  if (!greeting.has_values) return 0;
  return (greeting.is_in_one_round ? greeting.length : Part(greeting, p, ranks).length()) * item_size(greeting.dtype);
}

}  // namespace

void Lane::begin_greeting(const std::shared_ptr<Greeting>& greeting) {
  const std::size_t ranks = peers_.size(), item = item_size(greeting->dtype);
  const int others = static_cast<int>(greeting->arrivals.size());
  greeting->is_gathered = greeting->has_values && !greeting->is_in_one_round;
  greeting->awaited = others;
  greeting->pending = (greeting->is_gathered ? 4 : 2) * others + 1;
  greeting->all_greeted->pending = 1;
  const auto make = [&](std::uint8_t* data, std::size_t bytes) {
    auto message = std::make_shared<Message>();
    message->key = greeting->greeting_key;
    message->data = data;
    message->bytes = bytes;
    message->batches.push_back(greeting);
    return message;
  };
  std::size_t total = 0;
  for (const auto& arrival : greeting->arrivals)
    total += signature_bytes + count_value_bytes(*greeting, static_cast<std::size_t>(arrival.rank), ranks);
  greeting->sent.resize(total);
  std::vector<std::shared_ptr<Message>> received, sent;
  std::uint8_t* at = greeting->sent.data();
  for (std::size_t i = 0; i < greeting->arrivals.size(); ++i) {
    const auto p = static_cast<std::size_t>(greeting->arrivals[i].rank);
    const std::size_t bytes = count_value_bytes(*greeting, p, ranks);
    received.push_back(make(nullptr, signature_bytes + greeting->room));
    received.back()->reduction = greeting;
    received.back()->place = i;
    std::memcpy(at, &greeting->signature, signature_bytes);
    if (bytes > 0) {
      const std::size_t start = greeting->is_in_one_round ? 0 : Part(*greeting, p, ranks).start;
      std::memcpy(at + signature_bytes, greeting->x + start * item, bytes);
    }
    sent.push_back(make(at, signature_bytes + bytes));
    at += signature_bytes + bytes;
  }
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const int rank = greeting->arrivals[i].rank;
    expect(rank, std::move(received[i]));
    begin_sending(rank, std::move(sent[i]));
  }
  if (others == 0) ready_.push_back({greeting, 0});
}

void Lane::end_greeting(const std::shared_ptr<Greeting>& greeting) {
  const std::size_t ranks = peers_.size(), item = item_size(greeting->dtype), me = static_cast<std::size_t>(rank_);
  const std::size_t own_bytes = count_value_bytes(*greeting, me, ranks);
  bool differs = false;
  for (const auto& arrival : greeting->arrivals)
    differs = differs || arrival.bytes != signature_bytes + own_bytes ||
              std::memcmp(arrival.data.get(), &greeting->signature, signature_bytes) != 0;
  greeting->differs = differs;
  if (greeting->has_values && !differs && !greeting->is_abandoned) {
    const Part part = greeting->is_in_one_round ? Part(0, greeting->length) : Part(*greeting, me, ranks);
    std::uint8_t* own = greeting->x + part.start * item;
    std::vector<const void*> inputs(ranks, own);
    for (const auto& arrival : greeting->arrivals)
      inputs[static_cast<std::size_t>(arrival.rank)] = arrival.data.get() + signature_bytes;
    sum(own, greeting->dtype, inputs.data(), ranks, greeting->dtype, part.length(), greeting->scale);
    greeting->is_finite = is_finite(own, greeting->dtype, part.length());
    if (greeting->is_gathered) {
      for (const auto& arrival : greeting->arrivals) {
        const Part theirs(*greeting, static_cast<std::size_t>(arrival.rank), ranks);
        expect(arrival.rank, make_message(greeting, greeting->keeper, greeting->x + theirs.start * item, theirs.length() * item));
      }
      for (const auto& arrival : greeting->arrivals)
        begin_sending(arrival.rank, make_message(greeting, greeting->keeper, own, own_bytes));
    }
  } else if (greeting->is_gathered) {
    for (std::size_t i = 0; i < 2 * greeting->arrivals.size(); ++i) ledger_.count_down(*greeting);  // there are no sums
  }
  greeting->arrivals.clear();
  ledger_.count_down(*greeting->all_greeted);
}

void Lane::abandon(Greeting& greeting) {
  const std::lock_guard lock(mutex_);
  greeting.is_abandoned = true;
}

void Lane::fail_by_length(Peer& peer, std::size_t sent, std::size_t expected) {
  fail(peer, "sent a message of " + std::to_string(sent) + " bytes, but this rank expects " + std::to_string(expected));
}

void Lane::fail(Peer& peer, const std::string& trouble) {
  if (peer.trouble.empty()) peer.trouble = trouble;
  has_trouble_ = true;
}

bool Lane::has_sent_all() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;  // another thread moves messages
  return std::all_of(active_.begin(), active_.end(), [&](int number) {
    const Peer& peer = peers_[static_cast<std::size_t>(number)];
    return peer.sending.empty() && (peer.state != State::open || count_unsent(peer.fd) == 0);
  });
}

std::vector<std::uint64_t> Lane::list_unawaited() {
  std::vector<std::uint64_t> keys;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return keys;
  for (const int number : active_) {
    const Peer& peer = peers_[static_cast<std::size_t>(number)];
    for (const Aside& aside : peer.asides) keys.push_back(aside.key);
    if (peer.state == State::open && peer.arrived >= header_bytes && !peer.arriving) {
      std::uint64_t key;
      std::memcpy(&key, peer.header, 8);
      keys.push_back(key);
    }
  }
  return keys;
}

std::vector<std::pair<int, std::string>> Lane::list_broken() {
  if (!has_trouble_ && !cannot_accept_) return {};  // without the mutex, which the thread that serves the lane may hold for long
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<int, std::string>> broken;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    // A rank that has ended is no problem for ranks that wait for nothing of it.
    const bool is_awaited = !peer.sending.empty() || !peer.awaited.empty() || peer.arriving;
    if (!peer.trouble.empty() && (has_died_ || is_awaited))
      broken.emplace_back(static_cast<int>(i), peer.trouble);
    else if (cannot_accept_ && is_awaited && peer.state == State::unconnected && static_cast<int>(i) < rank_)
      broken.emplace_back(static_cast<int>(i), accept_trouble_);  // until a file is free
  }
  return broken;
}

}  // namespace topkube
