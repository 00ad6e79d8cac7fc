#include "cpu/records/mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // the C library can be older than the kernel
#endif

namespace topkube {

const uint8_t* map_file(int file, size_t bytes, size_t alignment) {
  // The kernel chooses any page for a mapping. So more addresses are reserved, and the surplus before and after is given back.
  void* reserved = ::mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(reserved), end = begin + bytes + alignment;
  const uintptr_t start = (begin + alignment - 1) & ~(alignment - 1);
  void* mapped = ::mmap(reinterpret_cast<void*>(start), bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, bytes + alignment);
    errno = error;
    return nullptr;
  }
  const uintptr_t page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)), after = (start + bytes + page - 1) & ~(page - 1);
  if (start > begin) ::munmap(reserved, start - begin);
  if (end > after) ::munmap(reinterpret_cast<void*>(after), end - after);
  return static_cast<const uint8_t*>(mapped);
}

void unmap_file(const uint8_t* start, size_t bytes) { ::munmap(const_cast<uint8_t*>(start), bytes); }

int collapse_pages(const uint8_t* start, size_t bytes) {
  return ::madvise(const_cast<uint8_t*>(start), bytes, MADV_COLLAPSE) == 0 ? 0 : errno;
}

}  // namespace topkube
