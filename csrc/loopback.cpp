// Preloaded into mpiexec (LD_PRELOAD): binds sockets to the loopback address instead of to all addresses.
//
// Hydra's control port and PRRTE's contact port do not authenticate their peers, and neither program has an option that binds
// the port to one address. Workers reach the port through their TLS session, which ends inside the launcher.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

extern "C" int bind(int descriptor, const struct sockaddr* address, socklen_t length) {
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
  if (address != nullptr && address->sa_family == AF_INET && length >= sizeof v4) {
    std::memcpy(&v4, address, sizeof v4);
    if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return (int)syscall(SYS_bind, descriptor, &v4, sizeof v4);
  }
  if (address != nullptr && address->sa_family == AF_INET6 && length >= sizeof v6) {
    std::memcpy(&v6, address, sizeof v6);
    if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) v6.sin6_addr = in6addr_loopback;
    return (int)syscall(SYS_bind, descriptor, &v6, sizeof v6);
  }
  return (int)syscall(SYS_bind, descriptor, address, length);
}
