// Matches messages with receives, by tag and in order.
// Touches base/ and wire/.
#include "link/matcher.h"

#include <algorithm>
#include <string>
#include <utility>

namespace farandole::link {

namespace {

void copy(const Pieces& from, const Pieces& to) {
  std::size_t offset = 0;
  for (const Piece& piece : from.list()) {
    to.copy_in(offset, piece.data, piece.bytes);
    offset += piece.bytes;
  }
}

// Memory that a grant or an unexpected message takes here, besides its bytes.
constexpr std::uint64_t kEntryBytes = 512;

bool announces(const wire::Frame& frame) { return frame.length == 0 && frame.total > 0; }

}  // namespace

Message::~Message() {
  if (matcher != nullptr) matcher->withdraw(*this);
}

Matcher::~Matcher() {
  const Error ended{Code::shut_down, "the engine has ended", -1};
  end_all(&ended);
}

void Matcher::send_frame(wire::FrameType type, Tag tag, std::uint64_t total) {
  if (state_ != Peer::active) return;
  wire::Frame frame;
  frame.type = type;
  frame.tag = tag;
  frame.total = total;
  writer_.push(frame);
}

Error Matcher::wrong_size(const Message& message, std::uint64_t other_bytes) const {
  const std::string mine = std::to_string(message.pieces.bytes());
  const std::string rank = std::to_string(peer_);
  const std::string other = std::to_string(other_bytes);
  const std::string text =
      message.sends ? "send of " + mine + " bytes to rank " + rank + ", but its receive expects " + other
                    : "receive expected " + mine + " bytes from rank " + rank + ", but the message has " + other;
  return {Code::precondition, text, peer_};
}

void Matcher::forget_if_empty(const Tag& tag) {
  const auto found = queues_.find(tag);
  if (found != queues_.end() && found->second.empty()) queues_.erase(found);
}

void Matcher::send(Message& message) {
  if (state_ == Peer::lost) return message.fail(lost_);
  if (state_ == Peer::left) return message.finish();
  const Tag tag = message.tag;
  TagQueues& queues = queues_[tag];
  if (queues.send_broken) {
    return message.fail({Code::aborted,
                         "cannot send to rank " + std::to_string(peer_) +
                             " with this tag: an earlier message with it was cancelled after a part had been sent",
                         peer_});
  }
  message.matcher = this;
  queues.sends.push_back(&message);
  if (self_) {
    match_self(queues);
  } else {
    start_first_send(queues);
  }
  forget_if_empty(tag);
}

// Starts the first send of the queues: sends it, or announces its size.
void Matcher::start_first_send(TagQueues& queues) {
  while (!queues.sends.empty() && !queues.sends.front()->enqueued) {
    Message& message = *queues.sends.front();
    const std::uint64_t bytes = message.pieces.bytes();
    if (needs_grant(bytes)) {
      if (message.announced) return;
      const auto granted = std::find(queues.grants.begin(), queues.grants.end(), bytes);
      if (granted == queues.grants.end()) {
        message.announced = queues.unanswered = true;
        return send_frame(wire::FrameType::data, message.tag, bytes);
      }
      queues.grants.erase(granted);
      unexpected_bytes_ -= kEntryBytes;
    }
    message.enqueued = true;
    writer_.enqueue(message);
  }
}

void Matcher::remove(Queue<Message*>& sends, const Message& message) {
  if (!sends.empty() && sends.front() == &message) return sends.pop_front();
  sends.erase_if([&](const Message* other) { return other == &message; });
}

void Matcher::sent(Message& message) {
  const Tag tag = message.tag;
  TagQueues& queues = queues_[tag];
  remove(queues.sends, message);
  message.finish();
  start_first_send(queues);
  forget_if_empty(tag);
}

bool Matcher::has_unexpected(const Tag& tag) const {
  const auto found = queues_.find(tag);
  if (found == queues_.end()) return false;
  const TagQueues& queues = found->second;
  return queues.receives.empty() && (!queues.unexpected.empty() || (self_ && !queues.sends.empty()));
}

bool Matcher::on_grant(const wire::Frame& frame) {
  TagQueues& queues = queues_[frame.tag];
  queues.grants.push_back(frame.total);
  unexpected_bytes_ += kEntryBytes;
  start_first_send(queues);
  forget_if_empty(frame.tag);
  return within_limit();
}

void Matcher::on_grant_cancelled(const wire::Frame& frame) {
  Queue<std::uint64_t>& grants = queues_[frame.tag].grants;
  const auto found = std::find(grants.begin(), grants.end(), frame.total);
  if (found != grants.end()) {
    grants.erase(found);
    unexpected_bytes_ -= kEntryBytes;
  }
  forget_if_empty(frame.tag);
}

bool Matcher::on_answer(const wire::Frame& frame) {
  TagQueues& queues = queues_[frame.tag];
  const bool expected = std::exchange(queues.unanswered, false);
  if (expected && !queues.send_broken) {
    Message& message = *queues.sends.front();
    if (frame.total == message.pieces.bytes()) {
      message.enqueued = true;
      writer_.enqueue(message);
    } else {
      message.fail(wrong_size(message, frame.total));
      queues.sends.pop_front();
      start_first_send(queues);
    }
  }
  forget_if_empty(frame.tag);
  return expected;
}

void Matcher::receive(Message& message) {
  const Tag tag = message.tag;
  TagQueues& queues = queues_[tag];
  message.matcher = this;
  queues.receives.push_back({&message, message.pieces.bytes()});
  if (self_) {
    match_self(queues);
  } else {
    const std::size_t place = queues.receives.size() - 1;
    const bool known = queues.unexpected.size() > place;  // it has arrived, or its announcement will be answered
    Posted& posted = queues.receives.back();
    posted.granted = needs_grant(posted.bytes) && !known;
    if (posted.granted) send_frame(wire::FrameType::grant, tag, posted.bytes);
    match(queues, tag);
  }
  if (state_ != Peer::active && message.state == Message::State::waiting) {
    queues.receives.erase_if([&](const Posted& posted) { return posted.message == &message; });
    message.fail(lost_);
  }
  forget_if_empty(tag);
}

void Matcher::fail_receive(Posted& posted, std::uint64_t sent_bytes) {
  Message* message = std::exchange(posted.message, nullptr);
  if (message != nullptr) message->fail(wrong_size(*message, sent_bytes));
}

void Matcher::cancel_grant(Posted& posted, const Tag& tag) {
  if (std::exchange(posted.granted, false)) send_frame(wire::FrameType::cancel_grant, tag, posted.bytes);
}

void Matcher::answer(Unexpected& unexpected, const Tag& tag, std::uint64_t expected) {
  if (std::exchange(unexpected.announced, false)) send_frame(wire::FrameType::answer, tag, expected);
}

// Ends the first receive and the first unexpected message, because their sizes differ.
void Matcher::fail_size_mismatch(TagQueues& queues, const Tag& tag) {
  Posted& posted = queues.receives.front();
  Unexpected& unexpected = queues.unexpected.front();
  fail_receive(posted, unexpected.total);
  answer(unexpected, tag, posted.bytes);
  if (unexpected.begun && !unexpected.complete()) {  // the rest of it is dropped when it arrives
    posted.bytes = unexpected.total;
    posted.arrived = unexpected.arrived;
  } else {
    queues.receives.pop_front();
  }
  remove_first_unexpected(queues);
}

void Matcher::remove_first_unexpected(TagQueues& queues) {
  unexpected_bytes_ -= kEntryBytes + queues.unexpected.front().bytes.size();
  queues.unexpected.pop_front();
}

void Matcher::match(TagQueues& queues, const Tag& tag) {
  while (!queues.receives.empty() && !queues.unexpected.empty()) {
    if (reading_ == &queues && queues.unexpected.size() == 1)
      return;  // continues after the frame that is being read into it
    Posted& posted = queues.receives.front();
    Unexpected& unexpected = queues.unexpected.front();
    if (unexpected.total != posted.bytes) {
      fail_size_mismatch(queues, tag);
      continue;
    }
    const bool complete = unexpected.complete();
    answer(unexpected, tag, posted.bytes);
    if (posted.message != nullptr) posted.message->pieces.copy_in(0, unexpected.bytes.data(), unexpected.arrived);
    posted.arrived = unexpected.arrived;
    remove_first_unexpected(queues);
    if (!complete) return;
    if (posted.message != nullptr) posted.message->finish();
    queues.receives.pop_front();
  }
}

void Matcher::match_self(TagQueues& queues) {
  if (!queues.receives.empty()) match(queues, queues.receives.front().message->tag);
  while (!queues.sends.empty()) {
    Message& from = *queues.sends.front();
    const std::size_t bytes = from.pieces.bytes();
    if (queues.receives.empty()) {
      if (needs_grant(bytes)) return;
      Unexpected& unexpected =
          queues.unexpected.push_back(Unexpected{bytes, std::vector<std::byte>(bytes), bytes, true});
      unexpected_bytes_ += kEntryBytes + bytes;
      from.pieces.copy_out(0, unexpected.bytes.data(), bytes);
      from.finish();
    } else {
      Message& to = *queues.receives.front().message;
      if (to.pieces.bytes() == bytes) {
        copy(from.pieces, to.pieces);
        from.finish();
        to.finish();
      } else {
        from.fail(wrong_size(from, to.pieces.bytes()));
        to.fail(wrong_size(to, bytes));
      }
      queues.receives.pop_front();
    }
    queues.sends.pop_front();
  }
}

bool Matcher::within_limit() {
  if (unexpected_bytes_ <= options_.max_unexpected_bytes) return true;
  error_text_ = "is too far ahead: its messages that wait for receives of this rank fill more than 2 GiB";
  return false;
}

// The message used a grant that was cancelled before the cancellation reached the sender.
bool Matcher::was_granted(const wire::Frame& frame) {
  const auto found = cancelled_grants_.find({frame.tag, frame.total});
  if (found == cancelled_grants_.end()) return false;
  if (--found->second == 0) cancelled_grants_.erase(found);
  return true;
}

// No receive is posted for this message. A large one may come only after a grant or an answer.
bool Matcher::begin_unexpected(TagQueues& queues, const wire::Frame& frame) {
  const bool more = !queues.unexpected.empty() && !queues.unexpected.back().complete();
  if (!more) {
    if (needs_grant(frame.total) && !announces(frame) && !was_granted(frame)) {
      error_text_ = "sent a large message without a grant from this rank";
      return false;
    }
    queues.unexpected.push_back({frame.total, {}});
    unexpected_bytes_ += kEntryBytes;
  }
  Unexpected& unexpected = queues.unexpected.back();
  if (unexpected.announced || unexpected.total != frame.total || unexpected.total - unexpected.arrived < frame.length)
    return false;
  if (announces(frame)) {
    unexpected.announced = true;
    return !more && within_limit();
  }
  reading_unexpected_ = true;
  unexpected.begun = true;
  unexpected_bytes_ += unexpected.arrived + frame.length - unexpected.bytes.size();
  unexpected.bytes.resize(unexpected.arrived + frame.length);
  return within_limit();
}

bool Matcher::on_data_begin(const wire::Frame& frame) {
  TagQueues& queues = queues_[frame.tag];
  const bool continues_unexpected = !queues.unexpected.empty() && !queues.unexpected.back().complete();
  reading_ = announces(frame) ? nullptr : &queues;
  if (continues_unexpected || queues.receives.empty()) return begin_unexpected(queues, frame);
  reading_unexpected_ = false;
  Posted& posted = queues.receives.front();
  if (frame.total != posted.bytes) {
    if (posted.arrived > 0) return false;
    fail_receive(posted, frame.total);
    if (posted.granted && !announces(frame)) ++cancelled_grants_[{frame.tag, posted.bytes}];
    cancel_grant(posted, frame.tag);
    if (!announces(frame)) {
      posted.bytes = frame.total;
      return true;
    }
    send_frame(wire::FrameType::answer, frame.tag, posted.bytes);
    queues.receives.pop_front();
    forget_if_empty(frame.tag);
    return true;
  }
  if (announces(frame)) {
    cancel_grant(posted, frame.tag);
    send_frame(wire::FrameType::answer, frame.tag, posted.bytes);
  }
  return posted.bytes - posted.arrived >= frame.length;
}

Pieces Matcher::destination(const wire::Frame& frame, std::size_t offset) {
  const std::size_t left = frame.length - offset;
  if (reading_unexpected_) {
    Unexpected& unexpected = reading_->unexpected.back();
    return Pieces(unexpected.bytes.data() + unexpected.arrived + offset, left);
  }
  const Posted& posted = reading_->receives.front();
  if (posted.message == nullptr) return {};
  return posted.message->pieces.slice(posted.arrived + offset, left);
}

void Matcher::on_data_arrived(const wire::Frame& frame) {
  if (announces(frame)) return;
  TagQueues& queues = *std::exchange(reading_, nullptr);
  if (reading_unexpected_) {
    queues.unexpected.back().arrived += frame.length;
    match(queues, frame.tag);
  } else {
    Posted& posted = queues.receives.front();
    posted.arrived += frame.length;
    if (posted.arrived == posted.bytes) {
      if (posted.message != nullptr) posted.message->finish();
      queues.receives.pop_front();
    }
  }
  forget_if_empty(frame.tag);
}

// When this returns, the caller may reuse the message's memory.
void Matcher::detach(TagQueues& queues, Message& message) {
  if (!message.sends) {
    if (self_) {
      queues.receives.erase_if([&](const Posted& posted) { return posted.message == &message; });
    } else {
      for (Posted& posted : queues.receives) {
        if (posted.message == &message) posted.message = nullptr;
      }
    }
    return;
  }
  remove(queues.sends, message);
  const bool unnoticed = !message.announced || message.enqueued;
  if (!writer_.drop(message) || !unnoticed) queues.send_broken = true;
}

void Matcher::withdraw(Message& message) {
  const Tag tag = message.tag;
  message.matcher = nullptr;
  TagQueues& queues = queues_[tag];
  detach(queues, message);
  if (self_) {
    match_self(queues);
  } else if (!queues.send_broken) {
    start_first_send(queues);
  }
  forget_if_empty(tag);
}

void Matcher::fail(const Error& why) {
  for (auto& [tag, queues] : queues_) {
    for (Message* message : Queue<Message*>(queues.sends)) {
      detach(queues, *message);
      message->fail(why);
    }
    for (const Posted& posted : Queue<Posted>(queues.receives)) {
      if (posted.message == nullptr) continue;
      detach(queues, *posted.message);
      posted.message->fail(why);
    }
  }
  std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
}

// Ends all sends and receives; with `why` null, sends count as done. Messages that have arrived completely can still be
// received.
void Matcher::end_all(const Error* why) {
  reading_ = nullptr;
  for (auto& [tag, queues] : queues_) {
    for (Message* message : queues.sends) {
      if (why == nullptr) {
        message->finish();
      } else {
        message->fail(*why);
      }
    }
    for (const Posted& posted : queues.receives) {
      if (posted.message != nullptr) posted.message->fail(why == nullptr ? lost_ : *why);
    }
    queues.sends.clear();
    queues.receives.clear();
    unexpected_bytes_ -= kEntryBytes * queues.grants.size();
    queues.grants.clear();
    queues.unanswered = false;
    queues.send_broken = false;
    if (queues.unexpected.empty() || queues.unexpected.back().complete()) continue;  // only the last may be incomplete
    unexpected_bytes_ -= kEntryBytes + queues.unexpected.back().bytes.size();
    queues.unexpected.erase(queues.unexpected.end() - 1);
  }
  std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
}

void Matcher::peer_left() {
  state_ = Peer::left;
  lost_ = {Code::shut_down, "rank " + std::to_string(peer_) + " has left", peer_};
  end_all(nullptr);
}

void Matcher::peer_lost(const Error& why) {
  state_ = Peer::lost;
  lost_ = why;
  end_all(&why);
}

}  // namespace farandole::link
