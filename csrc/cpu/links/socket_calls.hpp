// Small helpers around the system calls of sockets.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

namespace topkube {

// Seconds of a clock that never goes back.
inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Returns true if the last call failed only because it would have had to wait.
inline bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

inline std::string describe_errno() { return std::strerror(errno); }

inline void set_option(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); }

// Sets the options of a connection between ranks. A rank may be silent for minutes. The system then asks once a minute whether the
// other side is there: firewalls forget connections that are silent for longer, and a machine that has lost power says nothing.
inline void set_connection_options(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);   // seconds
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 15);  // seconds
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

}  // namespace topkube
