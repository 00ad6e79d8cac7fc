// Messages between ranks of different nodes, over several TCP connections between two ranks.
//
// Each lane (lane.hpp) has its own connections. The first lane is moved by the threads that wait; every other lane has a thread of
// its own. A long message is cut into parts, one for each lane, and so is a reduction, whose parts are added up by all threads. One
// thread cannot fill a link of more than about 10 Gbit/s, and some clouds limit the rate of a single connection.
//
// Messages of equal key between two ranks arrive in the order in which they were sent. A sender should not wait for the end of a
// message before it sends what the receiver waits for first: the parts of a long message may stay in the sockets of their lanes.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/links/lane.hpp"

namespace topkube {

class TcpLinks {
 public:
  static constexpr std::size_t token_bytes = Lane::token_bytes;
  using Token = Lane::Token;

  // `rank` of `ranks`, with a lane for each of `listeners`: listening sockets, which this object owns from now on. All ranks have
  // as many lanes. `own` and `answer` are the tokens that other ranks send to this rank and expect from it.
  TcpLinks(int rank, int ranks, const std::vector<int>& listeners, const Token& own, const Token& answer);
  ~TcpLinks();
  TcpLinks(const TcpLinks&) = delete;
  TcpLinks& operator=(const TcpLinks&) = delete;

  // Names the address (numeric, IPv4 or IPv6), the ports of all lanes and the tokens of another rank. Returns false if the address
  // is not numeric.
  bool set_peer(int peer, const std::string& address, const std::vector<int>& ports, const Token& own, const Token& answer);

  int rank() const { return rank_; }
  std::size_t ranks() const { return ranks_; }
  std::size_t lanes() const { return lanes_.size(); }

  // Begin to send or to receive a message. In all lanes, it has the same length on both sides. In one lane, by its number, it may
  // be shorter than the receiver's `message->bytes`.
  static constexpr int all_lanes = -1;
  void send(int peer, const std::shared_ptr<Message>& message, int lane);
  void receive(int peer, const std::shared_ptr<Message>& message, int lane);

  // Begins a sum. All ranks begin it with the same parameters.
  void reduce(const std::shared_ptr<DenseSum>& reduction);

  // Packs `change` for the owners of the segments, which have the `bounds`, and returns the sum, which puts its result into `total`.
  // `begin_integers` then exchanges it. All ranks call both with the same bounds, which are multiples of 256 but for the last.
  std::shared_ptr<IntegerSum> prepare_integers(float* change, float* total, const std::vector<std::size_t>& bounds, int bits,
                                               std::uint64_t key, std::shared_ptr<void> keeper) const;
  void begin_integers(const std::shared_ptr<IntegerSum>& sum);

  // Begins to exchange greetings with the ranks of `greeting->arrivals`, in the first lane. All ranks begin them in the same order, and
  // with an array, all ranks greet all others.
  void greet(const std::shared_ptr<Greeting>& greeting) {
    lanes_.front()->begin({-1, false, nullptr, greeting});
    advance();
  }
  void abandon(Greeting& greeting) { lanes_.front()->abandon(greeting); }

  // Returns the batch of these messages. `wait` returns when a batch is complete.
  std::shared_ptr<MessageBatch> gather(const std::vector<std::shared_ptr<Message>>& messages) { return ledger_.gather(messages); }

  // What the first lane does: see lane.hpp.
  void advance() { lanes_.front()->advance(); }
  void wait(double seconds, double spinning) { lanes_.front()->wait(seconds, spinning); }
  void wake() { lanes_.front()->wake(); }

  // Returns true if the system has sent all that was to be sent. Returns false without a wait if another thread uses a lane.
  bool has_sent_all();

  // Returns the keys of messages of the first lane that have arrived or are arriving, and that nothing waits for.
  std::vector<std::uint64_t> list_unawaited() { return lanes_.front()->list_unawaited(); }

  // Returns what went wrong: the rank at the other end, and a description. Messages that wait for such a rank never end.
  std::vector<std::pair<int, std::string>> list_broken();

  // Closes all connections, and ends the threads. Messages that are not complete stay incomplete, and `advance` and `wait` throw.
  void close();

  // Returns the keepers of messages that are complete. The caller drops them.
  std::vector<std::shared_ptr<void>> take_released() { return ledger_.take_released(); }

 private:
  std::size_t count_parts(std::size_t bytes) const;
  void begin(int peer, const std::shared_ptr<Message>& message, bool sends, int lane);
  void give(std::size_t lane, Order order);

  const int rank_;
  const std::size_t ranks_;
  const int process_;  // a child of this process has the same sockets, but no threads
  Ledger ledger_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::thread> threads_;  // of all lanes but the first
};

}  // namespace topkube
