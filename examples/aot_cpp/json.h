// A reader of JSON, for program.json alone: throws std::runtime_error at anything else than JSON.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {
  enum Kind { null, boolean, integer, real, string, array, object } kind = null;
  bool flag = false;
  int64_t whole = 0;
  double number = 0;
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> members;

  bool is(Kind k) const { return kind == k; }
  const Json& at(size_t i) const {
    if (kind != array || i >= items.size()) throw std::runtime_error("program.json: an array is too short");
    return items[i];
  }
  const Json& at(const std::string& name) const {
    auto found = members.find(name);
    if (found == members.end()) throw std::runtime_error("program.json: there is no '" + name + "'");
    return found->second;
  }
  bool has(const std::string& name) const { return members.count(name) > 0; }
  int64_t as_int() const {
    if (kind != integer) throw std::runtime_error("program.json: expected an integer");
    return whole;
  }
  const std::string& as_text() const {
    if (kind != string) throw std::runtime_error("program.json: expected a string");
    return text;
  }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : at_(text.data()), end_(text.data() + text.size()) {}

  Json read() {
    Json value = element(0);
    space();
    if (at_ != end_) fail();
    return value;
  }

 private:
  const char *at_, *end_;

  [[noreturn]] void fail() { throw std::runtime_error("program.json is no JSON"); }
  void space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) at_++;
  }
  char peek() {
    space();
    if (at_ == end_) fail();
    return *at_;
  }
  void expect(const char* word) {
    for (; *word; word++) {
      if (at_ == end_ || *at_++ != *word) fail();
    }
  }
  Json element(int depth) {
    if (depth > 200) fail();
    Json value;
    switch (peek()) {
      case 'n': expect("null"); return value;
      case 't': expect("true"); value.kind = Json::boolean; value.flag = true; return value;
      case 'f': expect("false"); value.kind = Json::boolean; return value;
      case '"': value.kind = Json::string; value.text = string(); return value;
      case '[': list(value, depth); return value;
      case '{': object(value, depth); return value;
      default: return number();
    }
  }
  void list(Json& value, int depth) {
    value.kind = Json::array;
    at_++;
    if (peek() == ']') { at_++; return; }
    for (;;) {
      value.items.push_back(element(depth + 1));
      if (peek() == ']') { at_++; return; }
      expect(",");
    }
  }
  void object(Json& value, int depth) {
    value.kind = Json::object;
    at_++;
    if (peek() == '}') { at_++; return; }
    for (;;) {
      if (peek() != '"') fail();
      std::string name = string();
      if (peek() != ':') fail();
      at_++;
      value.members[name] = element(depth + 1);
      if (peek() == '}') { at_++; return; }
      expect(",");
    }
  }
  std::string string() {
    std::string out;
    for (at_++; at_ < end_ && *at_ != '"'; at_++) {
      if (*at_ != '\\') { out += *at_; continue; }
      if (++at_ == end_) fail();
      static const std::map<char, char> plain = {{'n', '\n'}, {'t', '\t'}, {'r', '\r'}, {'b', '\b'}, {'f', '\f'},
                                                 {'"', '"'},  {'\\', '\\'}, {'/', '/'}};
      auto found = plain.find(*at_);
      if (found != plain.end()) { out += found->second; continue; }
      if (*at_ != 'u' || end_ - at_ < 5) fail();
      long code = std::strtol(std::string(at_ + 1, 4).c_str(), nullptr, 16);
      if (code > 127) fail();  // names are ASCII
      out += (char)code;
      at_ += 4;
    }
    if (at_ == end_) fail();
    at_++;
    return out;
  }
  Json number() {
    const char* start = at_;
    while (at_ < end_ && std::string("+-.eE0123456789").find(*at_) != std::string::npos) at_++;
    std::string text(start, at_);
    if (text.empty()) fail();
    Json value;
    bool real = text.find_first_of(".eE") != std::string::npos;
    value.kind = real ? Json::real : Json::integer;
    if (real) value.number = std::strtod(text.c_str(), nullptr);
    else value.whole = std::strtoll(text.c_str(), nullptr, 10);
    return value;
  }
};
