// Sums of integers (IntegerSum): what is packed before the first message, and the two stages in a lane.
#include <time.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "cpu/links/tcp_links.hpp"
#include "cpu/quantised/quantised.hpp"

namespace topkube {
namespace {

using Piece = IntegerSum::Piece;

std::size_t length_of(const Piece& piece) { return piece.stop - piece.start; }

QuantisedLayout layout_of(const IntegerSum& sum, const Piece& piece) { return {length_of(piece), sum.bits}; }

std::int64_t read_clock(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Records its life as a computation of a sum.
class Recorded {
 public:
  explicit Recorded(IntegerSum& sum)
      : sum_(sum), start_(read_clock(CLOCK_MONOTONIC)), processor_(read_clock(CLOCK_THREAD_CPUTIME_ID)) {}
  ~Recorded() {
    if (sum_.record == nullptr) return;
    const std::int64_t processor = read_clock(CLOCK_THREAD_CPUTIME_ID) - processor_;
    const std::lock_guard lock(sum_.record->mutex);
    sum_.record->done.push_back({start_, read_clock(CLOCK_MONOTONIC) - start_, processor});
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  IntegerSum& sum_;
  const std::int64_t start_, processor_;
};

// Writes integers of this rank's values into `row`, and leaves the rest of the values.
void pack(IntegerSum& sum, const Piece& piece, std::uint8_t* row) {
  if (length_of(piece) > 0 && !quantised_pack(sum.change + piece.start, layout_of(sum, piece), row)) *sum.is_whole_finite = false;
}

// Writes what the owner of a segment sends of the sum.
void unpack(IntegerSum& sum, const Piece& piece) {
  if (length_of(piece) > 0) quantised_unpack_add(sum.total + piece.start, layout_of(sum, piece), {piece.mean}, {1.0f}, true);
}

// Adds what has arrived for the own segment, in the order of the ranks, and packs the sum.
void reduce(IntegerSum& sum, std::size_t me) {
  const Piece& own = sum.pieces[me];
  std::vector<const std::uint8_t*> rows;
  for (std::size_t p = 0; p < sum.pieces.size(); ++p)
    if (p != me) rows.push_back(sum.pieces[p].arrived);
  if (length_of(own) > 0 && !rows.empty())
    quantised_unpack_add(sum.change + own.start, layout_of(sum, own), rows, std::vector<float>(rows.size(), 1.0f), false);
  pack(sum, own, own.mean);
}

}  // namespace

std::shared_ptr<IntegerSum> TcpLinks::prepare_integers(float* change, float* total, const std::vector<std::size_t>& bounds,
                                                       int bits, std::uint64_t key, std::shared_ptr<void> keeper) const {
  const auto me = static_cast<std::size_t>(rank_);
  std::size_t longest = 0;
  for (std::size_t p = 0; p < ranks_; ++p) longest = std::max(longest, bounds[p + 1] - bounds[p]);
  const std::size_t parts = count_parts(QuantisedLayout(longest, bits).bytes);
  auto whole = std::make_shared<IntegerSum>();
  whole->pending = 1;  // until it begins
  std::vector<std::shared_ptr<IntegerSum>> sums{whole};
  if (parts > 1) {
    sums.clear();
    while (sums.size() < parts) sums.push_back(std::make_shared<IntegerSum>());
  }
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < parts; ++i) {
    IntegerSum& sum = *sums[i];
    sum.change = change;
    sum.total = total;
    sum.bits = bits;
    sum.key = key;
    sum.keeper = keeper;
    sum.is_whole_finite = &whole->is_finite;
    sum.record = i == 0 ? whole.get() : nullptr;  // other lanes compute at the same time, in threads of their own
    for (std::size_t p = 0; p < ranks_; ++p) {
      // Blocks of integers have a scale each, so they are not cut.
      const std::size_t length = bounds[p + 1] - bounds[p], blocks = (length + quantised_block - 1) / quantised_block;
      const auto cut = [&](std::size_t part) { return bounds[p] + std::min(blocks * part / parts * quantised_block, length); };
      sum.pieces.push_back({cut(i), cut(i + 1)});
    }
    const std::size_t own_bytes = layout_of(sum, sum.pieces[me]).bytes;
    for (std::size_t p = 0; p < ranks_; ++p) {
      const std::size_t row_bytes = layout_of(sum, sum.pieces[p]).bytes;
      bytes += row_bytes;  // of the sum
      if (p == me) continue;
      bytes += row_bytes + own_bytes;
      whole->sent_bytes += row_bytes + own_bytes;
    }
  }
  whole->memory = std::make_unique_for_overwrite<std::uint8_t[]>(bytes);
  std::uint8_t* next = whole->memory.get();
  const auto take = [&](std::size_t count) { return std::exchange(next, next + count); };
  whole->record = whole.get();
  whole->done.reserve(ranks_ + 2);  // no allocation may fail when a computation ends
  const Recorded recorded(*whole);
  for (const auto& sum : sums) {
    const std::size_t own_bytes = layout_of(*sum, sum->pieces[me]).bytes;
    for (std::size_t p = 0; p < ranks_; ++p) {
      Piece& piece = sum->pieces[p];
      piece.mean = take(layout_of(*sum, piece).bytes);
      if (p == me) continue;
      piece.row = take(layout_of(*sum, piece).bytes);
      piece.arrived = take(own_bytes);
      pack(*sum, piece, piece.row);
    }
  }
  if (parts > 1) whole->split = std::move(sums);
  return whole;
}

void TcpLinks::begin_integers(const std::shared_ptr<IntegerSum>& sum) {
  if (sum->has_begun) throw std::runtime_error("this sum of integers has begun");
  sum->has_begun = true;
  if (sum->split.empty()) {
    give(0, {-1, false, nullptr, sum});
    return;
  }
  sum->pending = static_cast<int>(sum->split.size());
  const auto split = std::exchange(sum->split, {});  // from now on, the parts refer to the whole
  for (std::size_t i = split.size(); i-- > 0;) {     // the first lane last: the others begin meanwhile
    split[i]->whole = sum;
    give(i, {-1, false, nullptr, split[i]});
  }
}

void Lane::begin_integers(const std::shared_ptr<IntegerSum>& sum) {
  const std::size_t ranks = peers_.size(), me = static_cast<std::size_t>(rank_);
  const int others = static_cast<int>(ranks) - 1;
  const std::size_t own_bytes = layout_of(*sum, sum->pieces[me]).bytes;
  sum->awaited = others;
  sum->computations = others + 2;  // the sum, and what each rank sends of it
  sum->pending = 4 * others + sum->computations;
  for (std::size_t i = 1; i < ranks; ++i) {
    const std::size_t p = (me + i) % ranks;  // every rank begins with another one
    const int peer = static_cast<int>(p);
    const Piece& piece = sum->pieces[p];
    const std::size_t bytes = layout_of(*sum, piece).bytes;
    auto arriving = make_message(sum, sum, piece.arrived, own_bytes);
    arriving->reduction = sum;
    expect(peer, std::move(arriving));
    begin_sending(peer, make_message(sum, sum, piece.row, bytes));
    // The sum of that segment arrives only after that rank has received ours.
    auto mean = make_message(sum, sum, piece.mean, bytes);
    mean->reduction = sum;
    mean->place = p + 1;
    expect(peer, std::move(mean));
  }
  if (others == 0) ready_.push_back({sum, 0});
}

void Lane::continue_integers(const std::shared_ptr<IntegerSum>& sum, std::size_t place) {
  const std::size_t ranks = peers_.size(), me = static_cast<std::size_t>(rank_);
  {
    const Recorded recorded(*sum);
    if (place == 0)
      reduce(*sum, me);
    else
      unpack(*sum, sum->pieces[place - 1]);
  }
  if (place == 0) {
    const Piece& own = sum->pieces[me];
    for (std::size_t i = 1; i < ranks; ++i)
      peers_[(me + i) % ranks].sending.push_back(make_message(sum, sum, own.mean, layout_of(*sum, own).bytes));
    ready_.push_back({sum, me + 1});
  }
  if (--sum->computations == 0) ledger_.release(std::move(sum->keeper));
  ledger_.count_down(*sum);
}

}  // namespace topkube
