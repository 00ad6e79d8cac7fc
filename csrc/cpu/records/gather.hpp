// Gathers scattered records into one buffer, from memory or from open files (pread), and writes records to a file.
#pragma once
#include <cstddef>
#include <cstdint>

namespace topkube {

// Copies count records, source + offsets[i] with lengths[i] bytes, one after the other to out.
void gather_memory(const uint8_t* source, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out);

// Copies count records of equal length, source + rows[i] * length, one after the other to out.
void gather_rows(const uint8_t* source, size_t length, const int64_t* rows, size_t count, uint8_t* out);

// Does the same as gather_memory, but reads record i from files[i]. Returns count, or the number of the first record that could
// not be read completely. Then `error` is the errno, or 0 if the file ended too early.
size_t gather_files(const int32_t* files, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out, int& error);

// Writes count records of equal length to a file, record i at rows[i] * length. Returns count, or the number of the first record
// that could not be written completely. Then `error` is the errno.
size_t write_rows(int file, size_t length, const int64_t* rows, size_t count, const uint8_t* source, int& error);

}  // namespace topkube
