#include "cpu/links/tcp_links.hpp"

#include "cpu/reduction/reduce.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace topkube {
namespace {

// What epoll reports: the number of a peer, or one of these, or `stranger_base` and the file descriptor of a stranger.
constexpr std::uint64_t stranger_base = std::uint64_t{1} << 61;
constexpr std::uint64_t listener_number = std::uint64_t{1} << 62;
constexpr std::uint64_t wake_number = listener_number + 1;

constexpr char greeting[4] = {'T', 'K', 'L', '1'};
constexpr std::size_t greeting_bytes = sizeof greeting + sizeof(std::uint32_t) + TcpLinks::token_bytes;
// Other programs may connect too. There are so many places for those that have not proved that they are ranks: beyond, the one
// that has been silent for longest has to go.
constexpr std::size_t most_strangers = 64;  // and one for each rank
// A rank that cannot be reached may be so busy that its queue of connections is full: this rank tries again, after pauses that
// become longer.
constexpr int most_attempts = 6;
constexpr double first_pause = 0.05;
constexpr double shared_pause = 1e-3;  // of threads that wait at the same time: one may take the events of another
// A message is not longer than this: a longer one shows that the other rank does not speak our language.
constexpr std::size_t most_message_bytes = std::size_t{1} << 40;
constexpr int most_parts = 16;                                 // of one system call
constexpr std::size_t most_turn_bytes = std::size_t{4} << 20;  // of one peer, before it is the turn of the next

constexpr int reported_bytes = 128 << 10;  // see limit_reports

constexpr std::size_t least_limit = 4096;  // shorter messages arrive as a whole anyhow

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

std::string describe_errno() { return std::strerror(errno); }

// Compares without telling by its duration how much of the token was right.
bool are_equal(const char* token, const std::string& expected) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) difference |= static_cast<unsigned char>(token[i] ^ expected[i]);
  return difference == 0;
}

void set_option(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); }

}  // namespace

TcpLinks::TcpLinks(int rank, int ranks, int listener, Token own, Token answer)
    : rank_(rank),
      peers_(static_cast<std::size_t>(ranks)),
      own_(std::move(own)),
      answer_(std::move(answer)),
      listener_(listener),
      process_(::getpid()) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) {
    const std::string reason = describe_errno();
    for (const int fd : {listener_, epoll_, wake_})
      if (fd >= 0) ::close(fd);
    throw std::runtime_error("no more files can be opened: " + reason);
  }
  ::fcntl(listener_, F_SETFL, ::fcntl(listener_, F_GETFL) | O_NONBLOCK);
  watch(listener_, listener_number);
  watch(wake_, wake_number);
}

TcpLinks::~TcpLinks() {
  close();
  ::close(epoll_);
  ::close(wake_);
}

void TcpLinks::close() {
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    is_closed_ = true;
    for (Peer& peer : peers_) {
      if (peer.fd >= 0) {
        if (::getpid() == process_) {
          // If bytes are left in the socket, the other rank loses what it has not read.
          ::shutdown(peer.fd, SHUT_WR);
          char bytes[4096];
          while (::recv(peer.fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
          }
        }
        ::close(peer.fd);
      }
      peer.fd = -1;
      peer.state = State::broken;
      fail(peer, "is no longer connected: the links are closed");
    }
    active_.clear();
    for (const Stranger& stranger : strangers_) ::close(stranger.fd);
    strangers_.clear();
    ::close(listener_);
    listener_ = -1;
  }
  wake();
}

std::vector<std::shared_ptr<void>> TcpLinks::take_released() {
  const std::lock_guard lock(mutex_);
  return std::move(released_);
}

void TcpLinks::watch(int fd, std::uint64_t number) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  if (number == wake_number) event.events = EPOLLIN;
  event.data.u64 = number;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

bool TcpLinks::set_peer(int number, const std::string& address, int port, Token own, Token answer) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_.at(static_cast<std::size_t>(number));
  sockaddr_in four{};
  sockaddr_in6 six{};
  const void* from = nullptr;
  std::size_t size = 0;
  if (::inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<std::uint16_t>(port));
    from = &four, size = sizeof four;
  } else if (::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<std::uint16_t>(port));
    from = &six, size = sizeof six;
  } else {
    return false;
  }
  peer.address.assign(static_cast<const std::uint8_t*>(from), static_cast<const std::uint8_t*>(from) + size);
  peer.own = std::move(own);
  peer.answer = std::move(answer);
  return true;
}

// ---- messages

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

// ---- connections

void TcpLinks::begin_connection(int number) {
  Peer& peer = peers_[static_cast<std::size_t>(number)];
  if (peer.state != State::unconnected || number <= rank_) return;  // the rank with the lower number connects
  const auto* address = reinterpret_cast<const sockaddr*>(peer.address.data());
  if (peer.address.empty()) {
    peer.state = State::broken;
    fail(peer, "has no address");
    return;
  }
  peer.fd = ::socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  active_.push_back(number);
  peer.state = State::connecting;
  peer.answered.clear();
  if (peer.fd < 0 || (::connect(peer.fd, address, static_cast<socklen_t>(peer.address.size())) && errno != EINPROGRESS)) {
    end_attempt(number, "cannot be reached: " + describe_errno());
    return;
  }
  watch(peer.fd, static_cast<std::uint64_t>(number));
}

void TcpLinks::finish_connecting(int number) {
  Peer& peer = peers_[static_cast<std::size_t>(number)];
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(peer.fd, SOL_SOCKET, SO_ERROR, &error, &size);
  std::string said(greeting, sizeof greeting);
  const auto own_number = static_cast<std::uint32_t>(rank_);
  said.append(reinterpret_cast<const char*>(&own_number), sizeof own_number);
  said += peer.own;
  // The buffer of a new connection holds the few bytes of a greeting.
  if (error != 0 || ::send(peer.fd, said.data(), said.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(said.size())) {
    if (error != 0) errno = error;
    end_attempt(number, "cannot be reached: " + describe_errno());
    return;
  }
  set_option(peer.fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(peer.fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  peer.state = State::greeting;
}

void TcpLinks::hear_answer(int number) {
  Peer& peer = peers_[static_cast<std::size_t>(number)];
  char bytes[token_bytes];
  const ssize_t got = ::recv(peer.fd, bytes, token_bytes - peer.answered.size(), 0);
  if (got > 0) peer.answered.append(bytes, static_cast<std::size_t>(got));
  if (got == 0 || (got < 0 && !would_block()) ||
      (peer.answered.size() == token_bytes && !are_equal(peer.answered.data(), peer.answer))) {
    end_attempt(number, got == 0  ? "refused the connection"
                        : got < 0 ? "cannot be reached: " + describe_errno()
                                  : "answered as another program");
    return;
  }
  if (got < 0) peer.readable = false;
  if (peer.answered.size() == token_bytes) peer.state = State::open, peer.readable = peer.writable = true;
}

void TcpLinks::end_attempt(int number, const std::string& trouble) {
  Peer& peer = peers_[static_cast<std::size_t>(number)];
  if (peer.fd >= 0) ::close(peer.fd);
  peer.fd = -1;
  active_.erase(std::find(active_.begin(), active_.end(), number));
  if (++peer.attempts == most_attempts) {
    peer.state = State::broken;
    fail(peer, trouble);
    return;
  }
  peer.state = State::unconnected;
  peer.next_attempt = now() + first_pause * (1 << peer.attempts);
  failed_.push_back(number);
}

// Begins again what has failed for a reason that may have passed.
void TcpLinks::retry() {
  if (accepts_again_) accept_strangers();
  if (failed_.empty()) return;
  const double time = now();
  std::vector<int> due;
  std::erase_if(failed_, [&](int number) {
    const bool is_due = peers_[static_cast<std::size_t>(number)].next_attempt <= time;
    if (is_due) due.push_back(number);
    return is_due;
  });
  for (const int number : due) begin_connection(number);
}

void TcpLinks::accept_strangers() {
  for (;;) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == ECONNABORTED || errno == EINTR || errno == EPROTO)) continue;
    accepts_again_ = fd < 0 && !would_block();  // no more files can be opened at the moment
    if (fd < 0) return;
    Stranger stranger{fd, {}};
    watch(fd, stranger_base + static_cast<std::uint64_t>(fd));
    if (hear_stranger(stranger)) continue;
    if (strangers_.size() >= most_strangers + peers_.size()) {
      ::close(strangers_.front().fd);
      strangers_.pop_front();
    }
    strangers_.push_back(std::move(stranger));
  }
}

bool TcpLinks::hear_stranger(Stranger& stranger) {
  char bytes[greeting_bytes];
  const ssize_t got = ::recv(stranger.fd, bytes, greeting_bytes - stranger.said.size(), 0);
  if (got < 0 && would_block()) return false;
  if (got > 0) stranger.said.append(bytes, static_cast<std::size_t>(got));
  if (got > 0 && stranger.said.size() < greeting_bytes) return false;
  std::uint32_t number = 0;
  bool is_rank = stranger.said.size() == greeting_bytes && std::memcmp(stranger.said.data(), greeting, sizeof greeting) == 0 &&
                 are_equal(stranger.said.data() + sizeof greeting + sizeof number, own_);
  if (is_rank) {
    std::memcpy(&number, stranger.said.data() + sizeof greeting, sizeof number);
    is_rank = number < static_cast<std::uint32_t>(rank_) && peers_[number].state == State::unconnected &&
              ::send(stranger.fd, answer_.data(), answer_.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(answer_.size());
  }
  if (is_rank)
    adopt(static_cast<int>(number), stranger.fd);
  else
    ::close(stranger.fd);
  return true;
}

void TcpLinks::adopt(int number, int fd) {
  Peer& peer = peers_[static_cast<std::size_t>(number)];
  peer.fd = fd;
  peer.state = State::open;
  peer.readable = peer.writable = true;
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  active_.push_back(number);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = static_cast<std::uint64_t>(number);
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

// ---- bytes

bool TcpLinks::write_some(Peer& peer) {
  std::size_t written = 0;
  while (peer.writable && !peer.sending.empty() && written < most_turn_bytes) {
    std::uint8_t headers[most_parts][header_bytes];
    iovec parts[2 * most_parts];
    int count = 0;
    std::size_t skip = peer.sent, total = 0;
    for (std::size_t i = 0; i < peer.sending.size() && i < most_parts; ++i) {
      const Message& message = *peer.sending[i];
      std::memcpy(headers[i], &message.key, 8);
      const std::uint64_t length = message.bytes;
      std::memcpy(headers[i] + 8, &length, 8);
      if (skip < header_bytes) parts[count++] = {headers[i] + skip, header_bytes - skip};
      const std::size_t start = skip > header_bytes ? skip - header_bytes : 0;
      if (start < message.bytes) parts[count++] = {message.data + start, message.bytes - start};
      total += header_bytes + message.bytes - skip;
      skip = 0;
      if (total > most_turn_bytes) break;
    }
    msghdr call{};
    call.msg_iov = parts;
    call.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t result = ::sendmsg(peer.fd, &call, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0) {
      if (errno == EINTR) continue;
      peer.writable = false;
      if (!would_block()) {
        fail(peer, "lost the connection: " + describe_errno());  // what it has sent before may still be in the socket
        peer.readable = true;
      }
      break;
    }
    written += static_cast<std::size_t>(result);
    if (static_cast<std::size_t>(result) < total) peer.writable = false;  // the socket is full: epoll reports when it is not
    peer.sent += static_cast<std::size_t>(result);
    while (!peer.sending.empty() && peer.sent >= header_bytes + peer.sending.front()->bytes) {
      peer.sent -= header_bytes + peer.sending.front()->bytes;
      complete(*peer.sending.front());
      peer.sending.pop_front();
    }
  }
  return peer.writable && !peer.sending.empty();
}

bool TcpLinks::read_some(Peer& peer) {
  std::size_t read = 0;
  while (peer.readable) {
    if (read >= most_turn_bytes) return true;
    const bool has_header = peer.arrived >= header_bytes;
    if (has_header && !peer.arriving && !peer.arriving_aside) {
      begin_arrival(peer);
      if (!peer.arriving && !peer.arriving_aside) break;  // nothing waits for this rank: its bytes stay in the socket
      if (peer.arrived == header_bytes + peer.length) {
        end_arrival(peer);
        continue;
      }
    }
    // The rest of this message, and the header of the next.
    std::uint8_t next_header[header_bytes];
    iovec parts[2];
    int count = 0;
    std::size_t rest;
    if (!has_header) {
      rest = header_bytes - peer.arrived;
      parts[count++] = {peer.header + peer.arrived, rest};
    } else {
      std::uint8_t* to = peer.arriving ? peer.arriving->data : peer.arriving_aside->data.get();
      rest = header_bytes + peer.length - peer.arrived;
      parts[count++] = {to + (peer.arrived - header_bytes), rest};
      parts[count++] = {next_header, header_bytes};
    }
    msghdr call{};
    call.msg_iov = parts;
    call.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t result = ::recvmsg(peer.fd, &call, MSG_DONTWAIT);
    if (result < 0 && errno == EINTR) continue;
    if (result <= 0) {
      peer.readable = false;
      if (result == 0 || !would_block()) {
        fail(peer, result == 0 ? "closed its connection" : "lost the connection: " + describe_errno());
        peer.state = State::broken;
      }
      break;
    }
    const auto got = static_cast<std::size_t>(result);
    read += got;
    if (!has_header) {
      peer.arrived += got;
      if (got < rest && !peer.has_hung_up) peer.readable = false;
      continue;
    }
    peer.arrived += std::min(got, rest);
    if (got < rest + header_bytes && !peer.has_hung_up) peer.readable = false;  // it is empty: epoll reports the next bytes
    if (got >= rest) {
      end_arrival(peer);
      peer.arrived = got - rest;
      std::memcpy(peer.header, next_header, peer.arrived);
    }
  }
  return false;
}

void TcpLinks::begin_arrival(Peer& peer) {
  std::uint64_t length;
  std::memcpy(&peer.key, peer.header, 8);
  std::memcpy(&length, peer.header + 8, 8);
  peer.length = length;
  if (length > most_message_bytes) {
    fail(peer, "sent bytes that are no message");
    peer.state = State::broken;
    peer.readable = false;
    return;
  }
  const auto found =
      std::find_if(peer.awaited.begin(), peer.awaited.end(), [&](const auto& message) { return message->key == peer.key; });
  if (found != peer.awaited.end() && fits(**found, length)) {
    peer.arriving = std::move(*found);
    peer.awaited.erase(found);
  } else if (!peer.awaited.empty()) {
    if (found != peer.awaited.end()) fail_by_length(peer, length, (*found)->bytes);
    peer.arriving_aside = std::make_unique<Aside>();
    peer.arriving_aside->key = peer.key;
    peer.arriving_aside->bytes = length;
    peer.arriving_aside->data = std::make_unique_for_overwrite<std::uint8_t[]>(length);
  }
}

void TcpLinks::end_arrival(Peer& peer) {
  if (peer.arriving)
    complete(*peer.arriving);
  else
    peer.asides.push_back(std::move(*peer.arriving_aside));
  peer.arriving.reset();
  peer.arriving_aside.reset();
  peer.arrived = 0;
}

// ---- progress

void TcpLinks::handle(std::uint64_t number, std::uint32_t events) {
  if (number == wake_number) {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(wake_, &count, sizeof count);
    return;
  }
  if (number == listener_number) {
    accept_strangers();
    return;
  }
  if (number >= stranger_base) {
    const int fd = static_cast<int>(number - stranger_base);
    const auto found = std::find_if(strangers_.begin(), strangers_.end(), [&](const Stranger& other) { return other.fd == fd; });
    if (found != strangers_.end() && hear_stranger(*found)) strangers_.erase(found);
    return;
  }
  Peer& peer = peers_[number];
  if (peer.state == State::connecting && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) finish_connecting(static_cast<int>(number));
  if (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) peer.has_hung_up = true;
  if (events & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP)) peer.readable = true;
  if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) peer.writable = true;
  if (peer.state == State::greeting && peer.readable) hear_answer(static_cast<int>(number));
}

void TcpLinks::progress(const std::uint64_t* seen) {
  retry();
  for (bool has_more = true; has_more && !(seen != nullptr && completed_ != *seen);) {
    epoll_event events[64];
    const int count = ::epoll_wait(epoll_, events, 64, 0);
    for (int i = 0; i < count; ++i) handle(events[i].data.u64, events[i].events);
    has_more = count == 64;
    for (const int number : active_) {
      Peer& peer = peers_[static_cast<std::size_t>(number)];
      if (peer.state != State::open) continue;
      has_more = write_some(peer) || has_more;
      if (peer.state == State::open) has_more = read_some(peer) || has_more;
    }
    while (!ready_.empty()) {
      const std::shared_ptr<Reduction> reduction = std::move(ready_.front());
      ready_.pop_front();
      add_up(*reduction);
      if (reduction->is_gathered) send_sums(reduction);
      released_.push_back(std::move(reduction->keeper));
      count_down(*reduction);
      has_more = true;
    }
  }
}

void TcpLinks::advance() {
  const std::lock_guard lock(mutex_);
  require_open();
  lift_limits();
  const std::uint64_t before = completed_;
  progress(nullptr);
  if (completed_ != before && waiters_ > 0) signal();
}

void TcpLinks::require_open() const {
  if (is_closed_) throw std::runtime_error("the links between nodes are closed");
}

void TcpLinks::wait(double seconds) {
  struct Waiting {
    explicit Waiting(std::atomic<int>& waiters) : waiters(waiters), others(waiters.fetch_add(1)) {}
    ~Waiting() { --waiters; }
    std::atomic<int>& waiters;
    const int others;
  } waiting(waiters_);
  if (waiting.others > 0) signal();  // it sleeps for a short time from now on
  const double until = now() + seconds;
  for (;;) {
    double rest = until - now();
    {
      const std::lock_guard lock(mutex_);
      require_open();
      std::uint64_t& reported = reported_[std::this_thread::get_id()];
      const std::uint64_t before = completed_;
      progress(&reported);
      if (completed_ != before && waiters_ > 1) signal();
      if (completed_ != reported) {
        reported = completed_;
        return;
      }
      if (!failed_.empty()) rest = std::min(rest, first_pause);
      if (waiters_ > 1) rest = std::min(rest, shared_pause);
      limit_reports();
    }
    if (woken_.exchange(false) || until <= now()) return;
    epoll_event event;
    const int count = ::epoll_wait(epoll_, &event, 1, static_cast<int>(std::ceil(std::max(rest, 0.0) * 1e3)));
    const std::lock_guard lock(mutex_);
    if (is_closed_) continue;
    if (count == 0) lift_limits();
    if (count == 1) handle(event.data.u64, event.events);  // epoll reports each event once
  }
}

void TcpLinks::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

// The kernel reports a message when it is there, a long one 128 KiB at a time: at 1 Gbit/s, that saves a quarter of the processor
// time.
void TcpLinks::limit_reports() {
  for (const int number : active_) {
    Peer& peer = peers_[static_cast<std::size_t>(number)];
    const std::size_t rest = peer.arriving ? header_bytes + peer.length - peer.arrived : 0;
    const bool is_long = rest >= least_limit;
    if (peer.state != State::open || (!is_long && !peer.has_limit)) continue;
    peer.has_limit = is_long;
    set_option(peer.fd, SOL_SOCKET, SO_RCVLOWAT, is_long ? static_cast<int>(std::min<std::size_t>(rest, reported_bytes)) : 1);
  }
}

void TcpLinks::lift_limits() {
  for (const int number : active_) {
    Peer& peer = peers_[static_cast<std::size_t>(number)];
    if (!peer.has_limit) continue;
    peer.has_limit = false;
    peer.readable = true;
    set_option(peer.fd, SOL_SOCKET, SO_RCVLOWAT, 1);
  }
}

void TcpLinks::wake() {
  woken_ = true;
  if (waiters_ > 0) signal();
}

}  // namespace topkube
