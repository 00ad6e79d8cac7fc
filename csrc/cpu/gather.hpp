// Gathers records that lie anywhere into one buffer: from memory, or from open files by pread. And puts them into a file.
#pragma once
#include <cstddef>
#include <cstdint>

namespace topkube {

// Copies count records, source + offsets[i] with lengths[i] bytes, one after the other to out.
void gather_memory(const uint8_t* source, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out);

// Copies count records of equal length, source + rows[i] * length, one after the other to out.
void gather_rows(const uint8_t* source, size_t length, const int64_t* rows, size_t count, uint8_t* out);

// As gather_memory, from files[i]. Returns count, or the first record that could not be read whole; error is then its
// errno, 0 where the file ends too early.
size_t gather_files(const int32_t* files, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out,
                    int& error);

// Writes count records of equal length to a file, each at rows[i] * length. Returns count, or the first record that could
// not be written whole, and its errno.
size_t write_rows(int file, size_t length, const int64_t* rows, size_t count, const uint8_t* source, int& error);

}  // namespace topkube
