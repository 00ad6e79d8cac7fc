// Small helpers around the system calls of sockets.
#pragma once

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

}  // namespace topkube
