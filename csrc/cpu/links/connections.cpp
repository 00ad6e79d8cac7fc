// The part of Lane that makes connections: the rank with the lower number connects, and both prove that they are ranks.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

#include "cpu/links/lane.hpp"
#include "cpu/links/socket_calls.hpp"

namespace topkube {
namespace {

constexpr char greeting[4] = {'T', 'K', 'L', '1'};
constexpr std::size_t greeting_bytes = sizeof greeting + sizeof(std::uint32_t) + Lane::token_bytes;
// Other programs may connect too. There are so many places for those that have not proved that they are ranks: beyond, the one
// that has been silent for longest has to go.
constexpr std::size_t most_strangers = 64;  // and one for each rank
// A rank that cannot be reached may be so busy that its queue of connections is full: this rank tries again, after pauses that
// become longer.
constexpr int most_attempts = 6;

// Compares without telling by its duration how much of the token was right.
bool are_equal(const char* token, const std::string& expected) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) difference |= static_cast<unsigned char>(token[i] ^ expected[i]);
  return difference == 0;
}

}  // namespace

bool Lane::set_peer(int number, const std::string& address, int port, Token own, Token answer) {
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

void Lane::begin_connection(int number) {
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
  peer.has_hung_up = false;
  if (peer.fd < 0 || (::connect(peer.fd, address, static_cast<socklen_t>(peer.address.size())) && errno != EINPROGRESS)) {
    end_attempt(number, "cannot be reached: " + describe_errno());
    return;
  }
  watch(peer.fd, static_cast<std::uint64_t>(number));
}

void Lane::finish_connecting(int number) {
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
  set_connection_options(peer.fd);
  peer.state = State::greeting;
}

void Lane::hear_answer(int number) {
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

void Lane::end_attempt(int number, const std::string& trouble) {
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
void Lane::retry() {
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

void Lane::accept_strangers() {
  for (;;) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == ECONNABORTED || errno == EINTR || errno == EPROTO)) continue;
    accepts_again_ = fd < 0 && !would_block();  // no more files can be opened
    if (accepts_again_) accept_trouble_ = "cannot connect to this rank: " + describe_errno();
    pollfd waiting{listener_, POLLIN, 0};
    cannot_accept_ = accepts_again_ && ::poll(&waiting, 1, 0) == 1;  // somebody is there
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

bool Lane::hear_stranger(Stranger& stranger) {
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

void Lane::adopt(int number, int fd) {
  Peer& peer = peers_[static_cast<std::size_t>(number)];
  peer.fd = fd;
  peer.state = State::open;
  peer.readable = peer.writable = true;
  set_connection_options(fd);
  active_.push_back(number);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = static_cast<std::uint64_t>(number);
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

}  // namespace topkube
