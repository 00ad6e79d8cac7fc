#include "cpu/links/lane.hpp"

#include <fcntl.h>
#include <sched.h>
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
constexpr double longest_sleep = 10;   // of a thread that serves a lane
constexpr double shared_pause = 1e-3;  // of threads that wait at the same time: one may take the events of another

}  // namespace

Lane::Lane(int rank, int ranks, int listener, Token own, Token answer, Ledger& ledger)
    : rank_(rank),
      peers_(static_cast<std::size_t>(ranks)),
      own_(std::move(own)),
      answer_(std::move(answer)),
      listener_(listener),
      process_(::getpid()),
      ledger_(ledger) {
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

Lane::~Lane() {
  close();
  ::close(epoll_);
  ::close(wake_);
}

void Lane::close() {
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
  ++wakes_;
  signal();
}

void Lane::close_in_child() {
  if (is_closed_) return;
  is_closed_ = true;
  for (const Peer& peer : peers_)
    if (peer.fd >= 0) ::close(peer.fd);
  ::close(listener_);
}

void Lane::watch(int fd, std::uint64_t number) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  if (number == wake_number) event.events = EPOLLIN;
  event.data.u64 = number;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Lane::handle(std::uint64_t number, std::uint32_t events) {
  if (number == wake_number) return;  // for a thread that sleeps: see `sleep`
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

void Lane::progress(const std::uint64_t* seen) {
  retry();
  for (bool has_more = true; has_more && !(seen != nullptr && ledger_.completed() != *seen);) {
    epoll_event events[64];
    const int count = ::epoll_wait(epoll_, events, 64, 0);
    for (int i = 0; i < count; ++i) handle(events[i].data.u64, events[i].events);
    has_more = count == 64;
    take_orders();  // the signal of a later order is still there when this thread sleeps
    for (const int number : active_) {
      Peer& peer = peers_[static_cast<std::size_t>(number)];
      if (peer.state != State::open) continue;
      has_more = write_some(peer) || has_more;
      if (peer.state == State::open) has_more = read_some(peer) || has_more;
    }
    while (!ready_.empty()) {
      const auto [reduction, place] = std::move(ready_.front());
      ready_.pop_front();
      has_more = true;
      if (reduction->kind == Reduction::Kind::integers) {
        continue_integers(std::static_pointer_cast<IntegerSum>(reduction), place);
        if (place == 0) break;  // other ranks wait for what this rank sends now
        continue;
      }
      if (reduction->kind == Reduction::Kind::greeting) {
        end_greeting(std::static_pointer_cast<Greeting>(reduction));
      } else {
        const auto sum = std::static_pointer_cast<DenseSum>(reduction);
        add_up(*sum);
        if (sum->is_gathered) send_sums(sum);
      }
      ledger_.release(std::move(reduction->keeper));
      ledger_.count_down(*reduction);
    }
  }
}

void Lane::advance() {
  const std::lock_guard lock(mutex_);
  require_open();
  lift_limits();
  const std::uint64_t before = ledger_.completed();
  progress(nullptr);
  if (ledger_.completed() != before) notify();
}

void Lane::require_open() const {
  if (is_closed_) throw std::runtime_error("the links between nodes are closed");
}

void Lane::wait(double seconds, double spinning) {
  struct Waiting {
    explicit Waiting(std::atomic<int>& waiters) : waiters(waiters), others(waiters.fetch_add(1)) {}
    ~Waiting() { --waiters; }
    std::atomic<int>& waiters;
    const int others;
  } waiting(waiters_);
  if (waiting.others > 0) signal();  // it sleeps for a short time from now on
  const double until = now() + seconds, spins_until = std::min(now() + spinning, until);
  for (;;) {
    bool spins = false, is_long = false;
    double rest = 0;
    {
      const std::lock_guard lock(mutex_);
      require_open();
      Known& known = known_[std::this_thread::get_id()];
      progress(&known.completed);
      const std::uint64_t completed = ledger_.completed(), wakes = wakes_;
      const double time = now();
      if (completed != known.completed || wakes != known.wakes || time >= until) {
        if (completed != known.completed && waiters_ > 1) signal();  // the others do not know yet
        known = {completed, wakes};
        return;
      }
      spins = time < spins_until;
      if (!spins) {
        rest = until - time;
        if (!failed_.empty() || accepts_again_) rest = std::min(rest, first_pause);
        is_long = waiters_ == 1;
        if (!is_long) rest = std::min(rest, shared_pause);
        if (is_long) ++long_sleepers_;
        limit_reports();
      }
    }
    if (spins)
      ::sched_yield();
    else
      sleep(rest, is_long);
  }
}

// Waits for something to happen at a socket, at most for `seconds`. `is_long` if this thread counts as one of `long_sleepers_`.
void Lane::sleep(double seconds, bool is_long) {
  epoll_event event;
  const int count = ::epoll_wait(epoll_, &event, 1, static_cast<int>(std::ceil(std::max(seconds, 0.0) * 1e3)));
  const std::lock_guard lock(mutex_);
  if (is_long) --long_sleepers_;
  if (is_closed_) return;
  if (count == 0) lift_limits();
  if (count == 1 && event.data.u64 == wake_number && long_sleepers_ == 0) {  // otherwise it is for the thread that sleeps for long
    std::uint64_t signals;
    [[maybe_unused]] const ssize_t got = ::read(wake_, &signals, sizeof signals);
  }
  if (count == 1) handle(event.data.u64, event.events);  // epoll reports each event once
}

void Lane::serve(const std::function<void()>& notify) {
  try {
    serve_until_closed(notify);
  } catch (const std::exception& error) {  // no memory
    const std::lock_guard lock(mutex_);
    has_died_ = true;
    for (Peer& peer : peers_) {
      if (peer.fd >= 0) ::shutdown(peer.fd, SHUT_RDWR);
      peer.state = State::broken;
      fail(peer, std::string("cannot be reached any more: ") + error.what());
    }
  }
}

void Lane::serve_until_closed(const std::function<void()>& notify) {
  for (;;) {
    double rest = longest_sleep;
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_) return;
      const std::uint64_t before = ledger_.completed();
      progress(&before);
      if (ledger_.completed() != before) {
        notify();
        continue;
      }
      if (!failed_.empty() || accepts_again_) rest = first_pause;
      limit_reports();
    }
    sleep(rest, false);
  }
}

void Lane::begin(Order order) {
  const std::lock_guard lock(mutex_);
  carry_out(order);
}

void Lane::post(Order order) {
  {
    const std::lock_guard lock(orders_mutex_);
    orders_.push_back(std::move(order));
  }
  signal();
}

void Lane::take_orders() {
  {
    const std::lock_guard lock(orders_mutex_);
    taken_.swap(orders_);
  }
  for (Order& order : taken_) carry_out(order);
  taken_.clear();
}

void Lane::carry_out(Order& order) {
  if (order.reduction) {
    switch (order.reduction->kind) {
      case Reduction::Kind::dense: begin_sum(std::static_pointer_cast<DenseSum>(order.reduction)); break;
      case Reduction::Kind::greeting: begin_greeting(std::static_pointer_cast<Greeting>(order.reduction)); break;
      case Reduction::Kind::integers: begin_integers(std::static_pointer_cast<IntegerSum>(order.reduction));
    }
  } else if (order.sends) {
    begin_sending(order.peer, std::move(order.message));
  } else {
    expect(order.peer, std::move(order.message));
  }
}

void Lane::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

void Lane::wake() {
  ++wakes_;
  notify();
}

void Lane::notify() {
  if (waiters_ > 0) signal();
}

}  // namespace topkube
