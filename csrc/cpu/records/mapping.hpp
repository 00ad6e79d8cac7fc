// Mappings of files in a tmpfs (/dev/shm) that can have huge pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace topkube {

// Maps the first `bytes` bytes of an open file, shared and read-only, at a multiple of `alignment` (a power of two and a multiple
// of the page size). A huge page of a file can be a huge page of a mapping only if both begin at a multiple of its size. Returns
// nullptr with errno if the kernel refuses the mapping.
const uint8_t* map_file(int file, size_t bytes, size_t alignment);

// Ends a mapping of map_file.
void unmap_file(const uint8_t* start, size_t bytes);

// Moves the pages of a mapped range into huge pages. Returns 0 if all of them are huge pages now, or else the errno: EINVAL if this
// kernel cannot do it (before Linux 6.1), ENOMEM or EAGAIN if no huge page is free. The bytes are the same in every case. Source:
// madvise (2), MADV_COLLAPSE.
int collapse_pages(const uint8_t* start, size_t bytes);

}  // namespace topkube
