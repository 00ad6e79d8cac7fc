#include "cpu/links/tcp_links.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cpu/links/socket_calls.hpp"

namespace topkube {
namespace {

// What epoll reports: the number of a peer, or one of these, or `stranger_base` and the file descriptor of a stranger.
constexpr std::uint64_t listener_number = std::uint64_t{1} << 62;
constexpr std::uint64_t wake_number = listener_number + 1;
constexpr double shared_pause = 1e-3;  // of threads that wait at the same time: one may take the events of another

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

void TcpLinks::wake() {
  woken_ = true;
  if (waiters_ > 0) signal();
}

}  // namespace topkube
