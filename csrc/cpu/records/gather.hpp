// Copies of scattered records: from memory or from open files (pread) into one buffer, and from a buffer into a file.
#pragma once
#include <cstddef>
#include <cstdint>

namespace topkube {

// Copies count records, source + offsets[i] with lengths[i] bytes, one after the other to out.
void gather_memory(const uint8_t* source, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out);

// Copies count records of equal length, source + rows[i] * length, one after the other to out.
void gather_rows(const uint8_t* source, size_t length, const int64_t* rows, size_t count, uint8_t* out);

// Returns true if flags[rows[i]] is 1 for all count rows. Other processes may change the flags; what they have written before they
// set a flag is visible after the call.
bool are_all_set(const uint8_t* flags, const int64_t* rows, size_t count);

// Does the same as gather_memory, but reads record i from files[i]. Returns count, or the number of the first record that could
// not be read completely. Then `error` is the errno, or 0 if the file ended too early.
size_t gather_files(const int32_t* files, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out, int& error);

// Finds count samples in the shards that have them: shard k has the samples starts[k] to starts[k + 1] - 1 and is open as files[k],
// or not open if that is negative. Stores the file of each sample and its offset in the file. Returns false if a shard is not open,
// or if lengths[s] of a sample s differs from `length`.
bool find_samples(const int64_t* starts, const int32_t* files, size_t shards, const int64_t* offsets, const int64_t* lengths,
                  const int64_t* samples, size_t count, int64_t length, int32_t* sample_files, int64_t* sample_offsets);

// Writes count records of equal length to a file, record i at rows[i] * length. Returns count, or the number of the first record
// that could not be written completely. Then `error` is the errno.
size_t write_rows(int file, size_t length, const int64_t* rows, size_t count, const uint8_t* source, int& error);

}  // namespace topkube
