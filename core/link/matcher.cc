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
  const auto found = channels_.find(tag);
  if (found != channels_.end() && found->second.empty()) channels_.erase(found);
}

void Matcher::send(Message& message) {
  if (state_ == Peer::lost) return message.fail(lost_);
  if (state_ == Peer::left) return message.finish();
  const Tag tag = message.tag;
  Channel& channel = channels_[tag];
  if (channel.truncated) {
    return message.fail({Code::aborted,
                         "cannot send to rank " + std::to_string(peer_) +
                             " with this tag: an earlier message with it was cancelled after a part had been sent",
                         peer_});
  }
  message.matcher = this;
  channel.sends.push_back(&message);
  if (self_) {
    match_self(channel);
  } else {
    start_first_send(channel);
  }
  forget_if_empty(tag);
}

// Starts the first send of the channel: sends it, or announces its size.
void Matcher::start_first_send(Channel& channel) {
  while (!channel.sends.empty() && !channel.sends.front()->enqueued) {
    Message& message = *channel.sends.front();
    const std::uint64_t bytes = message.pieces.bytes();
    if (needs_grant(bytes)) {
      if (message.announced) return;
      const auto granted = std::find(channel.grants.begin(), channel.grants.end(), bytes);
      if (granted == channel.grants.end()) {
        message.announced = channel.unanswered = true;
        return send_frame(wire::FrameType::data, message.tag, bytes);
      }
      channel.grants.erase(granted);
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
  Channel& channel = channels_[tag];
  remove(channel.sends, message);
  message.finish();
  start_first_send(channel);
  forget_if_empty(tag);
}

bool Matcher::has_unexpected(const Tag& tag) const {
  const auto found = channels_.find(tag);
  if (found == channels_.end()) return false;
  const Channel& channel = found->second;
  return channel.receives.empty() && (!channel.unexpected.empty() || (self_ && !channel.sends.empty()));
}

bool Matcher::granted(const wire::Frame& frame) {
  Channel& channel = channels_[frame.tag];
  channel.grants.push_back(frame.total);
  unexpected_bytes_ += kEntryBytes;
  start_first_send(channel);
  forget_if_empty(frame.tag);
  return within_limit();
}

void Matcher::grant_cancelled(const wire::Frame& frame) {
  Queue<std::uint64_t>& grants = channels_[frame.tag].grants;
  const auto found = std::find(grants.begin(), grants.end(), frame.total);
  if (found != grants.end()) {
    grants.erase(found);
    unexpected_bytes_ -= kEntryBytes;
  }
  forget_if_empty(frame.tag);
}

bool Matcher::answered(const wire::Frame& frame) {
  Channel& channel = channels_[frame.tag];
  const bool expected = std::exchange(channel.unanswered, false);
  if (expected && !channel.truncated) {
    Message& message = *channel.sends.front();
    if (frame.total == message.pieces.bytes()) {
      message.enqueued = true;
      writer_.enqueue(message);
    } else {
      message.fail(wrong_size(message, frame.total));
      channel.sends.pop_front();
      start_first_send(channel);
    }
  }
  forget_if_empty(frame.tag);
  return expected;
}

void Matcher::receive(Message& message) {
  const Tag tag = message.tag;
  Channel& channel = channels_[tag];
  message.matcher = this;
  channel.receives.push_back({&message, message.pieces.bytes()});
  if (self_) {
    match_self(channel);
  } else {
    const std::size_t place = channel.receives.size() - 1;
    const bool known = channel.unexpected.size() > place;  // it has arrived, or its announcement will be answered
    Posted& posted = channel.receives.back();
    posted.granted = needs_grant(posted.bytes) && !known;
    if (posted.granted) send_frame(wire::FrameType::grant, tag, posted.bytes);
    match(channel, tag);
  }
  if (state_ != Peer::active && message.state == Message::State::waiting) {
    channel.receives.erase_if([&](const Posted& posted) { return posted.message == &message; });
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
void Matcher::end_unequal(Channel& channel, const Tag& tag) {
  Posted& posted = channel.receives.front();
  Unexpected& unexpected = channel.unexpected.front();
  fail_receive(posted, unexpected.total);
  answer(unexpected, tag, posted.bytes);
  if (unexpected.begun && !unexpected.complete()) {  // the rest of it is dropped when it arrives
    posted.bytes = unexpected.total;
    posted.moved = unexpected.moved;
  } else {
    channel.receives.pop_front();
  }
  remove_first_unexpected(channel);
}

void Matcher::remove_first_unexpected(Channel& channel) {
  unexpected_bytes_ -= kEntryBytes + channel.unexpected.front().bytes.size();
  channel.unexpected.pop_front();
}

void Matcher::match(Channel& channel, const Tag& tag) {
  while (!channel.receives.empty() && !channel.unexpected.empty()) {
    if (reading_ == &channel && channel.unexpected.size() == 1)
      return;  // continues after the frame that is being read into it
    Posted& posted = channel.receives.front();
    Unexpected& unexpected = channel.unexpected.front();
    if (unexpected.total != posted.bytes) {
      end_unequal(channel, tag);
      continue;
    }
    const bool complete = unexpected.complete();
    answer(unexpected, tag, posted.bytes);
    if (posted.message != nullptr) posted.message->pieces.copy_in(0, unexpected.bytes.data(), unexpected.moved);
    posted.moved = unexpected.moved;
    remove_first_unexpected(channel);
    if (!complete) return;
    if (posted.message != nullptr) posted.message->finish();
    channel.receives.pop_front();
  }
}

void Matcher::match_self(Channel& channel) {
  if (!channel.receives.empty()) match(channel, channel.receives.front().message->tag);
  while (!channel.sends.empty()) {
    Message& from = *channel.sends.front();
    const std::size_t bytes = from.pieces.bytes();
    if (channel.receives.empty()) {
      if (needs_grant(bytes)) return;
      Unexpected& unexpected =
          channel.unexpected.push_back(Unexpected{bytes, std::vector<std::byte>(bytes), bytes, true});
      unexpected_bytes_ += kEntryBytes + bytes;
      from.pieces.copy_out(0, unexpected.bytes.data(), bytes);
      from.finish();
    } else {
      Message& to = *channel.receives.front().message;
      if (to.pieces.bytes() == bytes) {
        copy(from.pieces, to.pieces);
        from.finish();
        to.finish();
      } else {
        from.fail(wrong_size(from, to.pieces.bytes()));
        to.fail(wrong_size(to, bytes));
      }
      channel.receives.pop_front();
    }
    channel.sends.pop_front();
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
bool Matcher::begin_unexpected(Channel& channel, const wire::Frame& frame) {
  const bool more = !channel.unexpected.empty() && !channel.unexpected.back().complete();
  if (!more) {
    if (needs_grant(frame.total) && !announces(frame) && !was_granted(frame)) {
      error_text_ = "sent a large message without a grant from this rank";
      return false;
    }
    channel.unexpected.push_back({frame.total, {}});
    unexpected_bytes_ += kEntryBytes;
  }
  Unexpected& unexpected = channel.unexpected.back();
  if (unexpected.announced || unexpected.total != frame.total || unexpected.total - unexpected.moved < frame.length)
    return false;
  if (announces(frame)) {
    unexpected.announced = true;
    return !more && within_limit();
  }
  reading_unexpected_ = true;
  unexpected.begun = true;
  unexpected_bytes_ += unexpected.moved + frame.length - unexpected.bytes.size();
  unexpected.bytes.resize(unexpected.moved + frame.length);
  return within_limit();
}

bool Matcher::data_begins(const wire::Frame& frame) {
  Channel& channel = channels_[frame.tag];
  const bool continues_unexpected = !channel.unexpected.empty() && !channel.unexpected.back().complete();
  reading_ = announces(frame) ? nullptr : &channel;
  if (continues_unexpected || channel.receives.empty()) return begin_unexpected(channel, frame);
  reading_unexpected_ = false;
  Posted& posted = channel.receives.front();
  if (frame.total != posted.bytes) {
    if (posted.moved > 0) return false;
    fail_receive(posted, frame.total);
    if (posted.granted && !announces(frame)) ++cancelled_grants_[{frame.tag, posted.bytes}];
    cancel_grant(posted, frame.tag);
    if (!announces(frame)) {
      posted.bytes = frame.total;
      return true;
    }
    send_frame(wire::FrameType::answer, frame.tag, posted.bytes);
    channel.receives.pop_front();
    forget_if_empty(frame.tag);
    return true;
  }
  if (announces(frame)) {
    cancel_grant(posted, frame.tag);
    send_frame(wire::FrameType::answer, frame.tag, posted.bytes);
  }
  return posted.bytes - posted.moved >= frame.length;
}

Pieces Matcher::destination(const wire::Frame& frame, std::size_t offset) {
  const std::size_t left = frame.length - offset;
  if (reading_unexpected_) {
    Unexpected& unexpected = reading_->unexpected.back();
    return Pieces(unexpected.bytes.data() + unexpected.moved + offset, left);
  }
  const Posted& posted = reading_->receives.front();
  if (posted.message == nullptr) return {};
  return posted.message->pieces.slice(posted.moved + offset, left);
}

void Matcher::data_arrived(const wire::Frame& frame) {
  if (announces(frame)) return;
  Channel& channel = *std::exchange(reading_, nullptr);
  if (reading_unexpected_) {
    channel.unexpected.back().moved += frame.length;
    match(channel, frame.tag);
  } else {
    Posted& posted = channel.receives.front();
    posted.moved += frame.length;
    if (posted.moved == posted.bytes) {
      if (posted.message != nullptr) posted.message->finish();
      channel.receives.pop_front();
    }
  }
  forget_if_empty(frame.tag);
}

// When this returns, the caller may reuse the message's memory.
void Matcher::detach(Channel& channel, Message& message) {
  if (!message.sends) {
    if (self_) {
      channel.receives.erase_if([&](const Posted& posted) { return posted.message == &message; });
    } else {
      for (Posted& posted : channel.receives) {
        if (posted.message == &message) posted.message = nullptr;
      }
    }
    return;
  }
  remove(channel.sends, message);
  const bool unnoticed = !message.announced || message.enqueued;
  if (!writer_.drop(message) || !unnoticed) channel.truncated = true;
}

void Matcher::withdraw(Message& message) {
  const Tag tag = message.tag;
  message.matcher = nullptr;
  Channel& channel = channels_[tag];
  detach(channel, message);
  if (self_) {
    match_self(channel);
  } else if (!channel.truncated) {
    start_first_send(channel);
  }
  forget_if_empty(tag);
}

void Matcher::fail(const Error& why) {
  for (auto& [tag, channel] : channels_) {
    for (Message* message : Queue<Message*>(channel.sends)) {
      detach(channel, *message);
      message->fail(why);
    }
    for (const Posted& posted : Queue<Posted>(channel.receives)) {
      if (posted.message == nullptr) continue;
      detach(channel, *posted.message);
      posted.message->fail(why);
    }
  }
  std::erase_if(channels_, [](const auto& entry) { return entry.second.empty(); });
}

// Ends all sends and receives; with `why` null, sends count as done. Messages that have arrived completely can still be
// received.
void Matcher::end_all(const Error* why) {
  reading_ = nullptr;
  for (auto& [tag, channel] : channels_) {
    for (Message* message : channel.sends) {
      if (why == nullptr) {
        message->finish();
      } else {
        message->fail(*why);
      }
    }
    for (const Posted& posted : channel.receives) {
      if (posted.message != nullptr) posted.message->fail(why == nullptr ? lost_ : *why);
    }
    channel.sends.clear();
    channel.receives.clear();
    unexpected_bytes_ -= kEntryBytes * channel.grants.size();
    channel.grants.clear();
    channel.unanswered = false;
    channel.truncated = false;
    if (channel.unexpected.empty() || channel.unexpected.back().complete())
      continue;  // only the last may be incomplete
    unexpected_bytes_ -= kEntryBytes + channel.unexpected.back().bytes.size();
    channel.unexpected.erase(channel.unexpected.end() - 1);
  }
  std::erase_if(channels_, [](const auto& entry) { return entry.second.empty(); });
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
