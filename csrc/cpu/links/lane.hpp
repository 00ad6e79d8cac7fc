// A lane: messages between ranks of different nodes, over TCP connections of our own.
//
// A lane has at most one connection to each other rank. The rank with the lower number connects, when one of its messages first
// needs the connection; the other rank listens. Both prove that they are ranks of the same world: the first bytes on a connection
// are a token that MPI brought to the other rank, and the answer is another token.
//
// A message is a header (key, length) and its bytes. Messages of equal key between two ranks arrive in the order in which they
// were sent. Bytes go from the sender's array to the socket and from the socket to the receiver's array, without a copy between.
// If a message arrives that nothing waits for yet, its bytes stay in the socket. Only if this rank waits for a later message of
// the same rank in this lane, they are put aside: the ranks may then wait for messages in different orders.
//
// An all-reduce can run here as a whole (`reduce`): the thread that waits also adds up what has arrived and sends the sums. Python,
// with its lock, is not needed between the first message and the last.
//
// `wait` sleeps in the kernel, without a pause of fixed length: the thread uses no processor time until bytes arrive.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/links/ledger.hpp"

namespace topkube {

// What a lane is asked to do: to send a message to a rank or to receive one, which has at most `message->bytes`; or a reduction. All
// ranks begin a reduction with the same parameters.
struct Order {
  int peer = -1;
  bool sends = false;
  std::shared_ptr<Message> message;
  std::shared_ptr<Reduction> reduction;
};

class Lane {
 public:
  static constexpr std::size_t token_bytes = 16;
  using Token = std::string;  // token_bytes bytes

  // `rank` of `ranks`. Connections arrive at `listener`, a listening socket, which this object owns from now on. `own` and `answer`
  // are the tokens that other ranks send to this rank and expect from it.
  Lane(int rank, int ranks, int listener, Token own, Token answer, Ledger& ledger);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Names the address (numeric, IPv4 or IPv6), port and tokens of another rank. Returns false if the address is not numeric.
  bool set_peer(int peer, const std::string& address, int port, Token own, Token answer);

  // Begins what the order asks for: at once, or (`post`) in the thread that serves this lane, without waiting for it.
  void begin(Order order);
  void post(Order order);

  // Lets a greeting that nobody waits for any more end without touching its array.
  void abandon(Greeting& greeting);

  // Moves messages until the lane is closed. Calls `notify` when a batch has become complete.
  void serve(const std::function<void()>& notify);

  // Moves all messages as far as the sockets allow, without waiting.
  void advance();

  // Moves messages until a batch becomes complete, `wake` is called or `seconds` pass. A batch that became complete, or a `wake`,
  // since the last `wait` of this thread counts too. Several threads may wait, and take turns at the sockets. For the first
  // `spinning` seconds, the thread does not sleep, but yields the processor and looks again: a sleep costs several microseconds.
  void wait(double seconds, double spinning);
  void wake();

  // Ends the sleep of threads that wait, if there are any, so that they see which batches are complete.
  void notify();

  // Returns true if the system has sent all that was to be sent. Returns false without a wait if another thread uses this lane.
  bool has_sent_all();

  // Returns the keys of messages that have arrived or are arriving, and that nothing waits for.
  std::vector<std::uint64_t> list_unawaited();

  // Returns what went wrong: the rank at the other end, and a description. Messages that wait for such a rank never end.
  std::vector<std::pair<int, std::string>> list_broken();

  // Closes all connections. Messages that are not complete stay incomplete, and `advance` and `wait` throw.
  void close();

  // Closes the sockets of a lane that a thread of the parent process served, whose work may have been interrupted by the fork.
  // This object must not be used or destroyed any more.
  void close_in_child();

 private:
  enum class State { unconnected, connecting, greeting, open, broken };
  static constexpr std::size_t header_bytes = 16;
  // A stranger is known to epoll by this number plus its file descriptor.
  static constexpr std::uint64_t stranger_base = std::uint64_t{1} << 61;
  // Before the second attempt to connect; later pauses are longer.
  static constexpr double first_pause = 0.05;

  // Bytes of a message that nothing waits for yet.
  struct Aside {
    std::uint64_t key = 0;
    std::size_t bytes = 0;
    std::unique_ptr<std::uint8_t[]> data;
  };

  struct Peer {
    int fd = -1;
    State state = State::unconnected;
    bool readable = false, writable = false;  // as far as this rank knows: epoll reports changes only
    bool has_hung_up = false, has_limit = false;
    std::vector<std::uint8_t> address;  // a sockaddr
    Token own, answer;                  // what the peer expects, and what it answers
    std::string trouble;
    int attempts = 0;  // to connect
    double next_attempt = 0;

    // Lists, because a deque takes 600 bytes when it is empty, and a world may have thousands of peers.
    std::list<std::shared_ptr<Message>> sending;
    std::size_t sent = 0;  // of the first message, with its header

    std::list<std::shared_ptr<Message>> awaited;
    std::list<Aside> asides;
    std::uint8_t header[header_bytes];
    std::size_t arrived = 0;                // bytes of the message that arrives now, with its header
    std::size_t length = 0;                 // of that message, once its header has arrived
    std::uint64_t key = 0;                  // of that message
    std::shared_ptr<Message> arriving;      // where its bytes go
    std::unique_ptr<Aside> arriving_aside;  // or here
    std::string answered;                   // bytes of the answer so far
  };

  // A connection whose first bytes have not all arrived.
  struct Stranger {
    int fd = -1;
    std::string said;
  };

  // Moves messages as far as possible; if `seen` is not null, until another number of batches is complete.
  void progress(const std::uint64_t* seen);
  void serve_until_closed(const std::function<void()>& notify);
  void sleep(double seconds, bool is_long);
  void take_orders();
  void carry_out(Order& order);
  void signal();
  void limit_reports();
  void lift_limits();
  void require_open() const;
  void begin_sum(const std::shared_ptr<DenseSum>& sum);
  void begin_greeting(const std::shared_ptr<Greeting>& greeting);
  void begin_integers(const std::shared_ptr<IntegerSum>& sum);
  void continue_integers(const std::shared_ptr<IntegerSum>& sum, std::size_t place);
  void begin_sending(int peer, std::shared_ptr<Message> message);
  void begin_connection(int peer);
  void end_attempt(int peer, const std::string& trouble);
  void retry();
  void watch(int fd, std::uint64_t number);
  void accept_strangers();
  bool hear_stranger(Stranger& stranger);  // returns true if the stranger has left, or is a peer now
  void adopt(int peer, int fd);
  void handle(std::uint64_t number, std::uint32_t events);
  void finish_connecting(int peer);
  void hear_answer(int peer);
  bool write_some(Peer& peer);
  bool read_some(Peer& peer);
  void begin_arrival(Peer& peer);
  void end_arrival(Peer& peer);
  static void give_memory(Message& message, std::unique_ptr<std::uint8_t[]> memory, std::size_t bytes);
  void complete(Message& message);
  void end_greeting(const std::shared_ptr<Greeting>& greeting);
  void add_up(DenseSum& sum);
  void send_sums(const std::shared_ptr<DenseSum>& sum);
  void expect(int peer, std::shared_ptr<Message> message);
  void fail(Peer& peer, const std::string& trouble);
  void fail_by_length(Peer& peer, std::size_t sent, std::size_t expected);
  static bool fits(const Message& message, std::size_t bytes);
  bool match_aside(Peer& peer, Message& message);

  std::mutex mutex_;
  const int rank_;
  std::vector<Peer> peers_;
  std::vector<int> active_;  // the peers with a connection
  std::deque<Stranger> strangers_;
  // A reduction of which all segments have arrived; or what the owner of segment `place` - 1 sends of a sum of integers.
  struct Ready {
    std::shared_ptr<Reduction> reduction;
    std::size_t place = 0;
  };
  std::deque<Ready> ready_;
  std::vector<int> failed_;  // ranks to which this rank connects again
  bool accepts_again_ = false, is_closed_ = false;
  Token own_, answer_;
  int listener_ = -1, process_ = -1;  // a child of this process has the same sockets
  int epoll_ = -1, wake_ = -1;
  Ledger& ledger_;
  std::mutex orders_mutex_;
  std::vector<Order> orders_;
  std::vector<Order> taken_;  // a member: if its use fails, nothing of it is destroyed in the thread that serves the lane
  std::atomic<bool> has_trouble_{false}, has_died_{false}, cannot_accept_{false};
  std::string accept_trouble_;
  struct Known {
    std::uint64_t completed = 0, wakes = 0;
  };
  std::unordered_map<std::thread::id, Known> known_;  // the batches and the wakes that each thread knows of
  std::atomic<std::uint64_t> wakes_{0};
  std::atomic<int> waiters_{0};
  int long_sleepers_ = 0;  // threads that sleep for longer than `shared_pause`: only a signal tells them that they are not alone
};

}  // namespace topkube
