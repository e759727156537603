// Matching of messages, by tag and in order.
// Touches base/ and wire/.
#include "link/mailbox.h"

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

// What a grant or a message that nobody has asked for takes here besides its bytes.
constexpr std::uint64_t kEach = 512;

bool announces(const wire::Frame& frame) { return frame.length == 0 && frame.total > 0; }

}  // namespace

Message::~Message() {
  if (mailbox != nullptr) mailbox->withdraw(*this);
}

Mailbox::~Mailbox() {
  const Error ended{Code::shut_down, "the engine has ended", -1};
  end_all(&ended);
}

void Mailbox::tell(wire::FrameType type, Tag tag, std::uint64_t total) {
  if (state_ != Peer::here) return;
  wire::Frame frame;
  frame.type = type;
  frame.tag = tag;
  frame.total = total;
  outbox_.push(frame);
}

Error Mailbox::wrong_size(const Message& message, std::uint64_t other) const {
  const std::string mine = std::to_string(message.pieces.bytes());
  const std::string rank = std::to_string(peer_);
  const std::string text =
      message.sends
          ? "send of " + mine + " bytes to rank " + rank + ", but its receive expects " + std::to_string(other)
          : "receive expected " + mine + " bytes from rank " + rank + ", but the message has " + std::to_string(other);
  return {Code::precondition, text, peer_};
}

void Mailbox::forget_if_empty(const Tag& tag) {
  const auto found = channels_.find(tag);
  if (found != channels_.end() && found->second.empty()) channels_.erase(found);
}

void Mailbox::send(Message& message) {
  if (state_ == Peer::lost) return message.fail(lost_);
  if (state_ == Peer::left) return message.finish();
  const Tag tag = message.tag;
  Channel& channel = channels_[tag];
  if (channel.truncated) {
    return message.fail(
        {Code::aborted, "an earlier message to rank " + std::to_string(peer_) + " was cancelled half-way", peer_});
  }
  message.mailbox = this;
  channel.sends.push_back(&message);
  if (self_) {
    match_self(channel);
  } else {
    start(channel);
  }
  forget_if_empty(tag);
}

// Sees to the first send of the channel: it goes out, or its size does.
void Mailbox::start(Channel& channel) {
  while (!channel.sends.empty() && !channel.sends.front()->enqueued) {
    Message& message = *channel.sends.front();
    const std::uint64_t bytes = message.pieces.bytes();
    if (large(bytes)) {
      if (message.announced) return;
      const auto granted = std::find(channel.grants.begin(), channel.grants.end(), bytes);
      if (granted == channel.grants.end()) {
        message.announced = channel.unanswered = true;
        return tell(wire::FrameType::data, message.tag, bytes);
      }
      channel.grants.erase(granted);
      early_bytes_ -= kEach;
    }
    message.enqueued = true;
    outbox_.enqueue(message);
  }
}

void Mailbox::remove(Queue<Message*>& sends, const Message& message) {
  if (!sends.empty() && sends.front() == &message) return sends.pop_front();
  sends.erase_if([&](const Message* other) { return other == &message; });
}

void Mailbox::sent(Message& message) {
  const Tag tag = message.tag;
  Channel& channel = channels_[tag];
  remove(channel.sends, message);
  message.finish();
  start(channel);
  forget_if_empty(tag);
}

bool Mailbox::early(const Tag& tag) const {
  const auto found = channels_.find(tag);
  if (found == channels_.end()) return false;
  const Channel& channel = found->second;
  return channel.receives.empty() && (!channel.early.empty() || (self_ && !channel.sends.empty()));
}

bool Mailbox::granted(const wire::Frame& frame) {
  Channel& channel = channels_[frame.tag];
  channel.grants.push_back(frame.total);
  early_bytes_ += kEach;
  start(channel);
  forget_if_empty(frame.tag);
  return room();
}

void Mailbox::ungranted(const wire::Frame& frame) {
  Queue<std::uint64_t>& grants = channels_[frame.tag].grants;
  const auto found = std::find(grants.begin(), grants.end(), frame.total);
  if (found != grants.end()) {
    grants.erase(found);
    early_bytes_ -= kEach;
  }
  forget_if_empty(frame.tag);
}

bool Mailbox::answered(const wire::Frame& frame) {
  Channel& channel = channels_[frame.tag];
  const bool expected = std::exchange(channel.unanswered, false);
  if (expected && !channel.truncated) {
    Message& message = *channel.sends.front();
    if (frame.total == message.pieces.bytes()) {
      message.enqueued = true;
      outbox_.enqueue(message);
    } else {
      message.fail(wrong_size(message, frame.total));
      channel.sends.pop_front();
      start(channel);
    }
  }
  forget_if_empty(frame.tag);
  return expected;
}

void Mailbox::receive(Message& message) {
  const Tag tag = message.tag;
  Channel& channel = channels_[tag];
  message.mailbox = this;
  channel.receives.push_back({&message, message.pieces.bytes()});
  if (self_) {
    match_self(channel);
  } else {
    const std::size_t place = channel.receives.size() - 1;
    const bool known = channel.early.size() > place;  // it has come, or its announcement will be answered
    Posted& posted = channel.receives.back();
    posted.granted = large(posted.bytes) && !known;
    if (posted.granted) tell(wire::FrameType::grant, tag, posted.bytes);
    match(channel, tag);
  }
  if (state_ != Peer::here && message.state == Message::State::waiting) {
    channel.receives.erase_if([&](const Posted& posted) { return posted.message == &message; });
    message.fail(lost_);
  }
  forget_if_empty(tag);
}

void Mailbox::reject(Posted& posted, std::uint64_t other) {
  Message* message = std::exchange(posted.message, nullptr);
  if (message != nullptr) message->fail(wrong_size(*message, other));
}

void Mailbox::ungrant(Posted& posted, const Tag& tag) {
  if (std::exchange(posted.granted, false)) tell(wire::FrameType::ungrant, tag, posted.bytes);
}

void Mailbox::answer(Early& early, const Tag& tag, std::uint64_t expected) {
  if (std::exchange(early.announced, false)) tell(wire::FrameType::answer, tag, expected);
}

// The first receive and the first early message differ in size.
void Mailbox::refuse(Channel& channel, const Tag& tag) {
  Posted& posted = channel.receives.front();
  Early& early = channel.early.front();
  reject(posted, early.total);
  answer(early, tag, posted.bytes);
  if (early.begun && !early.complete()) {  // the rest of it is dropped as it comes
    posted.bytes = early.total;
    posted.moved = early.moved;
  } else {
    channel.receives.pop_front();
  }
  end_early(channel);
}

void Mailbox::end_early(Channel& channel) {
  early_bytes_ -= kEach + channel.early.front().bytes.size();
  channel.early.pop_front();
}

void Mailbox::match(Channel& channel, const Tag& tag) {
  while (!channel.receives.empty() && !channel.early.empty()) {
    if (filling_ == &channel && channel.early.size() == 1) return;  // after the frame that is being read into it
    Posted& posted = channel.receives.front();
    Early& early = channel.early.front();
    if (early.total != posted.bytes) {
      refuse(channel, tag);
      continue;
    }
    const bool complete = early.complete();
    answer(early, tag, posted.bytes);
    if (posted.message != nullptr) posted.message->pieces.copy_in(0, early.bytes.data(), early.moved);
    posted.moved = early.moved;
    end_early(channel);
    if (!complete) return;
    if (posted.message != nullptr) posted.message->finish();
    channel.receives.pop_front();
  }
}

void Mailbox::match_self(Channel& channel) {
  if (!channel.receives.empty()) match(channel, channel.receives.front().message->tag);
  while (!channel.sends.empty()) {
    Message& from = *channel.sends.front();
    const std::size_t bytes = from.pieces.bytes();
    if (channel.receives.empty()) {
      if (large(bytes)) return;
      Early& early = channel.early.push_back(Early{bytes, std::vector<std::byte>(bytes), bytes, true});
      early_bytes_ += kEach + bytes;
      from.pieces.copy_out(0, early.bytes.data(), bytes);
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

bool Mailbox::room() {
  if (early_bytes_ <= options_.most_early) return true;
  fault_ = "is too far ahead: so many of its messages wait for receives of this rank that they fill 2 GiB";
  return false;
}

// It took a grant that was made void while it was on its way.
bool Mailbox::was_granted(const wire::Frame& frame) {
  const auto found = void_grants_.find({frame.tag, frame.total});
  if (found == void_grants_.end()) return false;
  if (--found->second == 0) void_grants_.erase(found);
  return true;
}

// Nobody has asked for it. Nothing that is large comes without a grant or an answer.
bool Mailbox::begin_early(Channel& channel, const wire::Frame& frame) {
  const bool more = !channel.early.empty() && !channel.early.back().complete();
  if (!more) {
    if (large(frame.total) && !announces(frame) && !was_granted(frame)) {
      fault_ = "sent a large message that this rank was not ready for";
      return false;
    }
    channel.early.push_back({frame.total, {}});
    early_bytes_ += kEach;
  }
  Early& early = channel.early.back();
  if (early.announced || early.total != frame.total || early.total - early.moved < frame.length) return false;
  if (announces(frame)) {
    early.announced = true;
    return !more && room();
  }
  filling_early_ = true;
  early.begun = true;
  early_bytes_ += early.moved + frame.length - early.bytes.size();
  early.bytes.resize(early.moved + frame.length);
  return room();
}

bool Mailbox::data_begins(const wire::Frame& frame) {
  Channel& channel = channels_[frame.tag];
  const bool more_of_early = !channel.early.empty() && !channel.early.back().complete();
  filling_ = announces(frame) ? nullptr : &channel;
  if (more_of_early || channel.receives.empty()) return begin_early(channel, frame);
  filling_early_ = false;
  Posted& posted = channel.receives.front();
  if (frame.total != posted.bytes) {
    if (posted.moved > 0) return false;
    reject(posted, frame.total);
    if (posted.granted && !announces(frame)) ++void_grants_[{frame.tag, posted.bytes}];
    ungrant(posted, frame.tag);
    if (!announces(frame)) {
      posted.bytes = frame.total;
      return true;
    }
    tell(wire::FrameType::answer, frame.tag, posted.bytes);
    channel.receives.pop_front();
    forget_if_empty(frame.tag);
    return true;
  }
  if (announces(frame)) {
    ungrant(posted, frame.tag);
    tell(wire::FrameType::answer, frame.tag, posted.bytes);
  }
  return posted.bytes - posted.moved >= frame.length;
}

Pieces Mailbox::place(const wire::Frame& frame, std::size_t offset) {
  const std::size_t left = frame.length - offset;
  if (filling_early_) {
    Early& early = filling_->early.back();
    return Pieces(early.bytes.data() + early.moved + offset, left);
  }
  const Posted& posted = filling_->receives.front();
  if (posted.message == nullptr) return {};
  return posted.message->pieces.slice(posted.moved + offset, left);
}

void Mailbox::data_arrived(const wire::Frame& frame) {
  if (announces(frame)) return;
  Channel& channel = *std::exchange(filling_, nullptr);
  if (filling_early_) {
    channel.early.back().moved += frame.length;
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

// The caller's memory is his again when this returns.
void Mailbox::abandon(Channel& channel, Message& message) {
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
  if (!outbox_.drop(message) || !unnoticed) channel.truncated = true;
}

void Mailbox::withdraw(Message& message) {
  const Tag tag = message.tag;
  message.mailbox = nullptr;
  Channel& channel = channels_[tag];
  abandon(channel, message);
  if (self_) {
    match_self(channel);
  } else if (!channel.truncated) {
    start(channel);
  }
  forget_if_empty(tag);
}

void Mailbox::fail(const Error& why) {
  for (auto& [tag, channel] : channels_) {
    for (Message* message : Queue<Message*>(channel.sends)) {
      abandon(channel, *message);
      message->fail(why);
    }
    for (const Posted& posted : Queue<Posted>(channel.receives)) {
      if (posted.message == nullptr) continue;
      abandon(channel, *posted.message);
      posted.message->fail(why);
    }
  }
  std::erase_if(channels_, [](const auto& entry) { return entry.second.empty(); });
}

// Every send and receive ends; null: sends count as done. What has arrived in full can still be received.
void Mailbox::end_all(const Error* why) {
  filling_ = nullptr;
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
    early_bytes_ -= kEach * channel.grants.size();
    channel.grants.clear();
    channel.unanswered = false;
    channel.truncated = false;
    if (channel.early.empty() || channel.early.back().complete()) continue;  // only the last may be incomplete
    early_bytes_ -= kEach + channel.early.back().bytes.size();
    channel.early.erase(channel.early.end() - 1);
  }
  std::erase_if(channels_, [](const auto& entry) { return entry.second.empty(); });
}

void Mailbox::peer_left() {
  state_ = Peer::left;
  lost_ = {Code::shut_down, "rank " + std::to_string(peer_) + " has left", peer_};
  end_all(nullptr);
}

void Mailbox::peer_lost(const Error& why) {
  state_ = Peer::lost;
  lost_ = why;
  end_all(&why);
}

}  // namespace farandole::link
