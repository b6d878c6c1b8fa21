// record/ keeps what happened: a run's history, TensorBoard event files and the report. This header
// has the shell that every HTML page of Headroom shares.
#ifndef HEADROOM_SRC_RECORD_PAGE_H_
#define HEADROOM_SRC_RECORD_PAGE_H_

#include <string>
#include <string_view>

namespace headroom::internal {

/// Text for HTML: as content and inside quoted attributes. Bytes that are not UTF-8 and characters
/// that steer text become U+FFFD, but for tabs and newlines.
std::string escape(std::string_view text);

/// A whole page around `body`, which is HTML and may bring <script> and <style> of its own. The
/// title is text. The page forbids itself the network (but for what serves it), follows the
/// reader's light or dark setting, and fits a phone.
///
/// What the style sheet offers:
///   <header>            the title's place: <h1>, and <p class="sub"> under it
///   <section>           a card: <h2>, <p class="note">, figures and tables
///   <div class="facts"> figures in a row: <div><b>131072</b><span>final scale</span></div>
///   <div class="wide">  around a <table>, so that it scrolls sideways on a phone
///   td.n, th.n          numbers, to the right; td.good, td.bad for verdicts
///   colours             var(--ink), --muted, --line, --card, --page, --blue, --orange, --green,
///                       --purple: safe for the colour-blind, readable on the card in both settings
std::string page(std::string_view title, std::string_view body);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_PAGE_H_
