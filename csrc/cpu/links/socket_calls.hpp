// Small helpers around the system calls of sockets.
#pragma once

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
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

// Returns how many bytes of a connection the system has not sent yet.
inline int count_unsent(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQNSD, &bytes) == 0 ? bytes : 0;
}

// Sets the options of a connection between ranks. A rank may be silent for minutes, and firewalls forget connections that are silent
// for longer. So the system asks after a minute whether the other side is there. A machine that has not answered for five minutes
// more, as after a loss of power, is gone: an outage of the network that is shorter ends no run.
inline void set_connection_options(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);   // seconds
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 15);  // seconds
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 20);
}

}  // namespace topkube
