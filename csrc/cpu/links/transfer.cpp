// The part of Lane that moves the bytes of messages between arrays and sockets.
#include <sys/uio.h>

#include <algorithm>

#include "cpu/links/lane.hpp"
#include "cpu/links/socket_calls.hpp"

namespace topkube {
namespace {

// A message is not longer than this: a longer one shows that the other rank does not speak our language.
constexpr std::size_t most_message_bytes = std::size_t{1} << 40;
constexpr int most_parts = 16;                                 // of one system call
constexpr std::size_t most_turn_bytes = std::size_t{4} << 20;  // of one peer, before it is the turn of the next
constexpr int most_reported_bytes = 128 << 10;                 // see limit_reports
constexpr std::size_t least_limited_bytes = 4096;              // shorter messages arrive as a whole anyhow

}  // namespace

bool Lane::write_some(Peer& peer) {
  std::size_t written = 0;
  while (peer.writable && !peer.sending.empty() && written < most_turn_bytes) {
    std::uint8_t headers[most_parts][header_bytes];
    iovec parts[2 * most_parts];
    int count = 0;
    std::size_t skip = peer.sent, total = 0;
    std::size_t i = 0;
    for (auto next = peer.sending.begin(); next != peer.sending.end() && i < most_parts; ++next, ++i) {
      const Message& message = **next;
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

bool Lane::read_some(Peer& peer) {
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

void Lane::begin_arrival(Peer& peer) {
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
    if ((*found)->data == nullptr) give_memory(**found, std::make_unique_for_overwrite<std::uint8_t[]>(length), length);
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

void Lane::end_arrival(Peer& peer) {
  if (peer.arriving)
    complete(*peer.arriving);
  else
    peer.asides.push_back(std::move(*peer.arriving_aside));
  peer.arriving.reset();
  peer.arriving_aside.reset();
  peer.arrived = 0;
}

// The kernel reports a message when it is there, a long one 128 KiB at a time: at 1 Gbit/s, that saves a quarter of the processor
// time.
void Lane::limit_reports() {
  for (const int number : active_) {
    Peer& peer = peers_[static_cast<std::size_t>(number)];
    const std::size_t rest = peer.arriving ? header_bytes + peer.length - peer.arrived : 0;
    const bool is_long = rest >= least_limited_bytes;
    if (peer.state != State::open || (!is_long && !peer.has_limit)) continue;
    peer.has_limit = is_long;
    set_option(peer.fd, SOL_SOCKET, SO_RCVLOWAT, is_long ? static_cast<int>(std::min<std::size_t>(rest, most_reported_bytes)) : 1);
  }
}

void Lane::lift_limits() {
  for (const int number : active_) {
    Peer& peer = peers_[static_cast<std::size_t>(number)];
    if (!peer.has_limit) continue;
    peer.has_limit = false;
    peer.readable = true;
    set_option(peer.fd, SOL_SOCKET, SO_RCVLOWAT, 1);
  }
}

}  // namespace topkube
